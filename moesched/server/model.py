"""The served model's name and limits; encodes prompts, and checks them against these limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moesched.errors import BadInput
from moesched.server.codec import Codec, encode
from moesched.server.errors import ApiError, bad_request
from moesched.server.generation import Prompt
from moesched.server.messages import Ready
from moesched.server.templates import Renders
from moesched.system.plain_text import shown

NEW_TOKENS = 16
"""Largest number of tokens of a completion if the request gives none, as in OpenAI's API."""


class Model:
    """A served model.

    Args:
        ready: the engine's message with the model's name and limits.
        codec: converts texts to tokens and back.
        template: renders conversations as prompts.
        chat_tokens: the largest number of tokens of an answer in a chat if the request gives none.

    Attributes:
        name: the name that requests give.
        loaded: the time at which the model was loaded, in seconds since 1970.
    """

    def __init__(
        self, ready: Ready, codec: Codec, template: Renders, *, chat_tokens: int, loaded: int
    ) -> None:
        self.name = ready.model
        self.ready = ready
        self.codec = codec
        self.loaded = loaded
        self._template = template
        self._chat_tokens = chat_tokens

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens of a prompt and its answer together."""
        return min(self.ready.context, self.ready.cache_tokens)

    def require(self, name: str) -> None:
        """Raise ApiError unless a request names this model."""
        if name != self.name:
            raise ApiError(
                404,
                f"no model {shown(name)} here: ask for {self.name}",
                param="model",
                code="model_not_found",
            )

    async def of_text(self, text: str) -> Prompt:
        """Encode a text as a prompt.

        Raises:
            ApiError: the text cannot be encoded, or is too long.
        """
        return Prompt(text, await self._encoded(text, "prompt"))

    async def of_chat(self, messages: Sequence[dict[str, Any]]) -> Prompt:
        """Encode a conversation as a prompt, by the model's template.

        Raises:
            ApiError: the template refuses the conversation, or its text cannot be encoded or is too long.
        """
        try:
            text = await self._template.render(messages)
        except BadInput as error:
            raise bad_request(str(error), "messages") from error
        return Prompt(text, await self._encoded(text, "messages", bare=self._template.bare))

    def of_ids(self, ids: Sequence[int]) -> Prompt:
        """Make a prompt of token ids.

        Raises:
            ApiError: an id is unknown, or there are too many or none.
        """
        prompt = list(ids)
        self._require(prompt, "prompt")
        return Prompt(self.codec.decode(prompt), prompt)

    def answer_tokens(self, asked: int | None, prompts: Sequence[Prompt], *, chat: bool) -> int:
        """Return the largest number of tokens of each answer, at least 1: `asked` or, if that is None, a default.

        The default is lowered to the number of tokens for which the longest prompt leaves room.

        Args:
            asked: the number that the request gives; None if it gives none.
            chat: whether the default is that of chats rather than of completions.

        Raises:
            ApiError: prompt and answer together are too long.
        """
        longest = max(len(prompt.ids) for prompt in prompts)
        room = self.most_tokens - longest
        default = self._chat_tokens if chat else NEW_TOKENS
        tokens = max(1, min(default, room) if asked is None else asked)
        if tokens > room:
            raise bad_request(
                f"a prompt of {longest} tokens and {tokens} new ones are more than the {self.most_tokens} that a "
                "request may have: shorten it, or lower max_tokens",
                "messages" if chat else "prompt",
                "context_length_exceeded",
            )
        return tokens

    async def _encoded(self, text: str, field: str, *, bare: bool = False) -> list[int]:
        try:
            ids = await encode(self.codec, text, self.most_tokens, bare=bare)
        except BadInput as error:
            raise bad_request(f"the prompt cannot be used: {error}", field) from error
        self._require(ids, field)
        return ids

    def _require(self, ids: Sequence[int], field: str) -> None:
        """Raise ApiError, with the request's field `field` in it, unless these token ids can be a prompt."""
        if not ids:
            raise bad_request("the prompt is empty: give at least one token", field)
        most = min(self.ready.prompt_tokens, self.most_tokens - 1)
        if len(ids) > most:
            raise bad_request(
                f"the prompt has {len(ids)} tokens, and may have {most}: shorten it",
                field,
                "context_length_exceeded",
            )
        unknown = next((token for token in ids if not 0 <= token < self.ready.vocabulary), None)
        if unknown is not None:
            raise bad_request(
                f"token id {shown(unknown)} is outside the vocabulary of {self.ready.vocabulary}: "
                f"use ids from 0 to {self.ready.vocabulary - 1}",
                field,
            )

"""The fields of requests in OpenAI's API: fields that the server supports, and fields that it ignores."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from moesched.server.errors import bad_request
from moesched.system.plain_text import shown

MOST_INT = 2**63 - 1
MOST_CHOICES = 128
MOST_STOPS = 16
MOST_LIKELIEST = 20
MOST_OF_USER = 256
"""The most characters of a user's name, which the admission rule keeps."""

HARMLESS = frozenset(
    ["metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"]
    + ["service_tier", "store"]
)
"""Unsupported fields that change no answer: they are ignored, with any value."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "audio": (),
        "best_of": (1,),
        "frequency_penalty": (0,),
        "function_call": ("none",),
        "functions": ([],),
        "logit_bias": ({},),
        "modalities": (["text"],),
        "prediction": (),
        "presence_penalty": (0,),
        "reasoning_effort": ("none",),
        "response_format": ({"type": "text"},),
        "suffix": ("",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
)
"""Unsupported fields, and the values besides null with which they change no answer; others are refused."""

Role: TypeAlias = Literal["system", "developer", "user", "assistant"]
PartType: TypeAlias = Literal["text"]
CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"role": get_args(Role), "type": get_args(PartType)}
)
"""The values that a field may have, by the field's name."""


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Generated(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chats share; None is the same as an absent field."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    seed: Annotated[int, Meta(ge=-MOST_INT - 1, le=MOST_INT)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=1, le=MOST_INT)] | None = None
    user: Annotated[str, Meta(max_length=MOST_OF_USER)] | None = None

    @property
    def answers(self) -> int:
        """The number of answers to the request."""
        return self.n or 1

    @property
    def answers_field(self) -> str:
        """Name of the field that asks for more answers than one."""
        return "n"

    @property
    def streams_usage(self) -> bool:
        """True if the answer is a stream whose last event has the token counts of prompt and answer.

        Raises:
            ApiError: the counts are asked for, and the answer is no stream.
        """
        asked = self.stream_options is not None and bool(self.stream_options.include_usage)
        if asked and not self.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        return asked

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that end an answer.

        Raises:
            ApiError: a text is empty, or there are too many.
        """
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MOST_STOPS:
            raise bad_request(f"stop has {len(stops)} texts, and may have {MOST_STOPS}: give fewer", "stop")
        if not all(stops):
            raise bad_request(f"stop is {shown(self.stop)}, with an empty text: omit that one", "stop")
        return stops


class CompletionRequest(Generated, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    max_tokens: Annotated[int, Meta(ge=0, le=MOST_INT)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MOST_LIKELIEST)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts; the field has a text, a list of texts, a list of token ids, or a list of such lists.

        Raises:
            ApiError: the field mixes these, or is empty.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        given: Any = self.prompt
        kinds = set(map(type, given))
        if kinds == {int}:
            return [given]
        if kinds in ({str}, {list}):
            return given  # type: ignore[no-any-return]  # all are texts, or all are lists of ids
        raise bad_request(
            f"prompt is {shown(given)}: give a text, a list of texts, token ids, or a list of lists of them",
            "prompt",
        )

    @property
    def answers(self) -> int:
        """The number of answers to all prompts."""
        return len(self.prompts) * (self.n or 1)

    @property
    def answers_field(self) -> str:
        """Name of the field that asks for more answers than one: `prompt` with several prompts and one answer each."""
        return "prompt" if self.n in (None, 1) else "n"


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A text that is a part of a message's content."""

    text: str
    type: PartType = "text"


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a conversation.

    The fields after `name` are those of answers, which clients may send back as messages; they have to be empty.
    """

    role: Role
    content: str | list[TextPart]
    name: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Meta(max_length=0)] | None = None

    @property
    def text(self) -> str:
        """The text of the message."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Generated, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1, le=MOST_INT)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1, le=MOST_INT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_LIKELIEST)] | None = None

    @property
    def most_tokens(self) -> int | None:
        """Largest number of tokens of an answer: `max_completion_tokens` or `max_tokens`; None if both are absent.

        Raises:
            ApiError: both are given, and differ.
        """
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise bad_request(
                f"max_tokens is {old}, and max_completion_tokens {new}: give one of them", "max_tokens"
            )
        return old if new is None else new

"""The forms of answers: JSON objects of completions and of chats, whole or as the chunks of a stream."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import msgspec

from moesched.server.codec import Codec
from moesched.server.generation import AnswerPiece, Scored
from moesched.server.messages import Ending
from moesched.server.replies import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatPiece,
    ChosenToken,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    LikelyToken,
    Usage,
)

LOWEST = -9999.0
"""The log probability that stands for minus infinity, which JSON cannot represent."""


class Whole(NamedTuple):
    """A whole answer: its text, its tokens with their log probabilities, and the reason why it ended."""

    text: str
    tokens: list[Scored]
    ending: Ending


class FirstFields(NamedTuple):
    """Fields that are the same in each JSON object of an answer, and come first: id, creation time and model."""

    id: str
    created: int
    model: str


class Form(ABC):
    """Writes the answers to one request in the form of an endpoint.

    Args:
        model: the served model's name.
        codec: converts tokens to text, for log probabilities.
        scored: whether log probabilities are wanted.
        with_usage: whether each piece of a stream has the field `usage`.
    """

    kind: ClassVar[str]
    """The beginning of an answer's id."""

    def __init__(self, model: str, codec: Codec, *, scored: bool, with_usage: bool) -> None:
        self._head = FirstFields(f"{self.kind}-{secrets.token_hex(12)}", int(time.time()), model)
        self._codec = codec
        self._scored = scored
        self._usage = None if with_usage else msgspec.UNSET

    @abstractmethod
    def whole(self, answers: Sequence[Whole], usage: Usage) -> msgspec.Struct:
        """Make the object with all answers, for a response that is no stream."""

    @abstractmethod
    def chunk(self, piece: AnswerPiece) -> msgspec.Struct:
        """Make the event of a stream for a piece of an answer."""

    @abstractmethod
    def last(self, usage: Usage) -> msgspec.Struct:
        """Make the event that ends a stream, with the usage."""


class CompletionForm(Form):
    """Writes answers in the form of /v1/completions."""

    kind = "cmpl"

    def whole(self, answers: Sequence[Whole], usage: Usage) -> msgspec.Struct:
        choices = [
            CompletionChoice(index, each.text, self._logprobs(each.tokens), each.ending)
            for index, each in enumerate(answers)
        ]
        return Completion(*self._head, choices, usage)

    def chunk(self, piece: AnswerPiece) -> msgspec.Struct:
        logprobs = self._logprobs(piece.tokens)
        choice = CompletionChoice(piece.answer, piece.text, logprobs, piece.ending)
        return Completion(*self._head, [choice], self._usage)

    def last(self, usage: Usage) -> msgspec.Struct:
        return Completion(*self._head, [], usage)

    def _logprobs(self, tokens: Sequence[Scored]) -> CompletionLogprobs | None:
        return completion_logprobs(tokens, self._codec) if self._scored else None


class ChatForm(Form):
    """Writes answers in the form of /v1/chat/completions."""

    kind = "chatcmpl"

    def __init__(self, model: str, codec: Codec, *, scored: bool, with_usage: bool) -> None:
        super().__init__(model, codec, scored=scored, with_usage=with_usage)
        self._begun: set[int] = set()
        """The answers that have a first piece."""

    def whole(self, answers: Sequence[Whole], usage: Usage) -> msgspec.Struct:
        choices = []
        for index, (text, tokens, ending) in enumerate(answers):
            logprobs = chat_logprobs(tokens, self._codec) if self._scored else None
            choices.append(ChatChoice(index, AnswerMessage(text), logprobs, ending))
        return ChatCompletion(*self._head, choices, usage)

    def chunk(self, piece: AnswerPiece) -> msgspec.Struct:
        first = piece.answer not in self._begun  # the first chunk of an answer has the role
        self._begun.add(piece.answer)
        delta = Delta("assistant" if first else None, piece.text if piece.text or first else None)
        logprobs = chat_logprobs(piece.tokens, self._codec) if self._scored else None
        return ChatChunk(*self._head, [ChatPiece(piece.answer, delta, logprobs, piece.ending)], self._usage)

    def last(self, usage: Usage) -> msgspec.Struct:
        return ChatChunk(*self._head, [], usage)


def gathered(pieces: Iterable[AnswerPiece], answers: int) -> list[Whole]:
    """Join the pieces of each answer, in order of the answers' indices."""
    texts: list[list[str]] = [[] for _ in range(answers)]
    tokens: list[list[Scored]] = [[] for _ in range(answers)]
    endings: list[Ending] = ["length"] * answers
    for piece in pieces:
        texts[piece.answer].append(piece.text)
        tokens[piece.answer] += piece.tokens
        endings[piece.answer] = piece.ending or "length"
    return [
        Whole("".join(text), scored, ending)
        for text, scored, ending in zip(texts, tokens, endings, strict=True)
    ]


def completion_logprobs(scored: Sequence[Scored], codec: Codec) -> CompletionLogprobs:
    """Return the log probabilities of a completion's tokens."""
    texts = [token_key(codec, each.token) for each in scored]
    return CompletionLogprobs(
        texts,
        [None if each.logprob is None else finite(each.logprob.logprob) for each in scored],
        [_likeliest(each, text, codec) for each, text in zip(scored, texts, strict=True)],
        [each.offset for each in scored],
    )


def _likeliest(scored: Scored, text: str, codec: Codec) -> dict[str, float] | None:
    """Return the log probabilities of the likeliest tokens and the chosen one, by `token_key`; None if there are none.

    text: the chosen token's `token_key`.
    """
    if scored.logprob is None:
        return None
    found: dict[str, float] = {}
    for token, logprob in scored.logprob.likeliest:
        found.setdefault(token_key(codec, token), finite(logprob))
    found.setdefault(text, finite(scored.logprob.logprob))
    return found


def chat_logprobs(scored: Sequence[Scored], codec: Codec) -> ChatLogprobs:
    """Return the log probabilities of a chat's tokens; the first token of a prompt, which has none, is left out."""
    chosen = []
    for token, logprob, _ in scored:
        if logprob is not None:
            likeliest = [
                LikelyToken(token_text(codec, each), finite(value), list(codec.bytes_of(each)))
                for each, value in logprob.likeliest
            ]
            own = list(codec.bytes_of(token))
            chosen.append(ChosenToken(token_text(codec, token), finite(logprob.logprob), own, likeliest))
    return ChatLogprobs(chosen)


def token_key(codec: Codec, token: int) -> str:
    r"""Return a token's text, or its bytes if they are no whole characters, in OpenAI's form `bytes:\xe2\x80`."""
    data = codec.bytes_of(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def token_text(codec: Codec, token: int) -> str:
    """Return the text of one token; bytes that are no whole character become U+FFFD."""
    return codec.bytes_of(token).decode(errors="replace")


def finite(logprob: float) -> float:
    """Return a log probability that JSON can represent: `LOWEST` in place of minus infinity."""
    return max(logprob, LOWEST)

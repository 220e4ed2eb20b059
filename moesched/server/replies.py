"""JSON objects of answers, with the fields of OpenAI's API."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

import msgspec

from moesched.server.messages import Ending

Choice = TypeVar("Choice")


class Usage(msgspec.Struct, frozen=True):
    """Numbers of tokens: of the prompts, of the answers, and of both together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def usage(prompt: int, completion: int) -> Usage:
    """Return the `Usage` of `prompt` prompt tokens and `completion` answer tokens."""
    return Usage(prompt, completion, prompt + completion)


class Answers(msgspec.Struct, Generic[Choice], frozen=True):
    """Answers to a request, or pieces of them; only whole answers and the last piece have a usage."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


# ---------------------------------------------------------------- /v1/completions


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities by token, in lists of equal length; `text_offset` has the place of each token in the text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """An answer to a prompt, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Ending | None = None


class Completion(Answers[CompletionChoice], frozen=True):
    """The answer of /v1/completions, or a piece of it."""

    object: Literal["text_completion"] = "text_completion"


# ---------------------------------------------------------------- /v1/chat/completions


class LikelyToken(msgspec.Struct, frozen=True):
    """A token that the model could have chosen at a position: its log probability, and its text also as bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(LikelyToken, frozen=True):
    """A token, and the most likely candidates at its position."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log probabilities of an answer's tokens, in order."""

    content: list[ChosenToken]
    refusal: None = None


class AnswerMessage(msgspec.Struct, frozen=True):
    """A whole answer, as a message of the conversation."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of an answer's message, in a stream."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """An answer to a conversation."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Ending


class ChatPiece(msgspec.Struct, frozen=True):
    """A piece of an answer to a conversation."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: Ending | None = None


class ChatCompletion(Answers[ChatChoice], frozen=True):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"


class ChatChunk(Answers[ChatPiece], frozen=True):
    """A piece of the answer of /v1/chat/completions."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"

"""The messages between the front, which speaks HTTP, and the engine, which runs the model; and their frames.

A frame is a list of messages in MessagePack, preceded by its size in bytes (4 bytes in network order).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import msgspec

from moesched.errors import MoeschedError
from moesched.requests.logprobs import Logprob as Logprob

LENGTH = struct.Struct("!I")
MOST_FRAME_BYTES = 1 << 30
"""Largest frame: fits the longest request with the most answers, and log probabilities of 3 million prompt tokens."""


class Ask(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Message from the front that asks for an answer to a prompt.

    Attributes:
        number: a number that no other request has.
        ids: the ids of the prompt's tokens.
        new_tokens: the largest number of tokens to generate.
        temperature, top_k, top_p, seed: settings of the sampling.
        logprobs: the number of likeliest tokens to name with each token; None for no log probabilities.
        echo: whether to give the log probabilities of the prompt's tokens as well.
        user: name of the user who sent the request, for the admission rule.
    """

    number: int
    ids: list[int]
    new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    logprobs: int | None = None
    echo: bool = False
    user: str = ""


class Leave(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Message from the front that cancels a request: a stop string came, or the client left."""

    number: int


class Close(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Message from the front that no more requests will come: the engine ends once its last request is done."""


class Starting(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Message from the engine before it is ready.

    Attributes:
        what: the stage of the engine's start, in words for the user.
        done, total: the number of pages of weights loaded so far, and in all; 0 before loading begins.
    """

    what: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Message from the engine that weights are loaded: the model that it serves, and the limits of requests.

    Attributes:
        model: the model's name.
        policy: the name of the policy.
        predicted: predicted tokens per second with the most requests at once; None unless the planner chose the policy.
        machine: the name of the machine.
        places: number of micro-batches.
        sequences: the largest number of requests of a micro-batch.
        cache_tokens: tokens in the KV cache of a micro-batch.
        prompt_tokens: the most prompt tokens of a micro-batch in a step.
        context: the largest number of tokens of a request, prompt and answer together.
        vocabulary: the number of tokens that the model knows.
    """

    model: str
    policy: str
    predicted: float | None
    machine: str
    places: int
    sequences: int
    cache_tokens: int
    prompt_tokens: int
    context: int
    vocabulary: int


Ending: TypeAlias = Literal["stop", "length"]


class Token(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Message from the engine with one more token of a request.

    Attributes:
        number: the request's number.
        token: the token's id.
        ending: "stop" if a stop token ended the request, "length" if it has `Ask.new_tokens` tokens; None if more
            follow.
        logprob: the token's log probability; None if not asked for.
        prompt: log probabilities of the prompt's tokens, with None for the first of them; only sent with the request's
            first token, and if asked for.
    """

    number: int
    token: int
    ending: Ending | None = None
    logprob: Logprob | None = None
    prompt: list[Logprob | None] | None = None


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Message from the engine that it refuses a request, such as one that is too long."""

    number: int
    why: str


class Broken(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Message from the engine that it broke off a request; the others go on."""

    number: int
    why: str


class State(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Message from the engine about its load; sent a few times a second while it is busy, and once it is idle.

    Attributes:
        running: number of requests that run.
        waiting: number of requests that wait to run.
        held: tokens of the KV cache that requests take.
        room: tokens of the KV cache in all.
        steps: steps so far.
        busy: seconds that each lane ran so far, by its name.
    """

    running: int
    waiting: int
    held: int
    room: int
    steps: int
    busy: dict[str, float]


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Message from the engine that it ends now, and all its requests with it; `why` is one line."""

    why: str


ToEngine: TypeAlias = Ask | Leave | Close
ToFront: TypeAlias = Starting | Ready | Token | Refused | Broken | State | Failed


class BadServerFrame(MoeschedError):
    """A frame is too long, or is no list of messages."""


_encoder = msgspec.msgpack.Encoder()


def frame(messages: Sequence[ToEngine] | Sequence[ToFront]) -> bytes:
    """Encode messages as a frame."""
    body = _encoder.encode(messages)
    return LENGTH.pack(len(body)) + body


class Frames:
    """Decoder that collects bytes as they arrive, and returns the messages of complete frames.

    Args:
        kind: the type of the messages: `ToEngine` or `ToFront`.
    """

    def __init__(self, kind: object) -> None:
        self._decoder: msgspec.msgpack.Decoder[list[ToEngine | ToFront]] = msgspec.msgpack.Decoder(list[kind])  # type: ignore[valid-type]  # a type that is chosen at run time
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[ToEngine | ToFront]:
        """Add the bytes `data`, and yield the messages of all frames that are now complete.

        Raises:
            BadServerFrame: the bytes are no frame.
        """
        self._bytes += data
        while len(self._bytes) >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes)
            if length > MOST_FRAME_BYTES:
                raise BadServerFrame(f"a frame of {length} bytes: the longest has {MOST_FRAME_BYTES}")
            end = LENGTH.size + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[LENGTH.size : end])
            del self._bytes[:end]
            try:
                yield from self._decoder.decode(body)
            except msgspec.MsgspecError as error:
                raise BadServerFrame(f"a frame that is no list of messages: {error}") from error

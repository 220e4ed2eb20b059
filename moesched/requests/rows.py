"""Rows of a step that serves requests: new tokens of requests that join and leave between steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moesched.requests.logprobs import WantedLogprobs
from moesched.requests.sampling import Sampling
from moesched.tasks import Phase


class Row(NamedTuple):
    """The new tokens of one request in a step.

    Attributes:
        request: the request's number; each has a number of its own.
        start: the number of its tokens before the step.
        tokens: the number of its new tokens.
        generated: the number of its generated tokens before the step.
        samples: whether a token is sampled after them.
        ids: ids of the new tokens; None for the token that was sampled last, and where nothing is computed.
        sampling: the way that its tokens are chosen.
        cache_tokens: tokens that the request takes in the KV cache at the end, in whole blocks.
        logprobs: the log probabilities that the request asks for; None for none.
        following: the prompt's token after these, if the prompt goes on and has log probabilities; else None.
    """

    request: int
    start: int
    tokens: int
    generated: int = 0
    samples: bool = True
    ids: Sequence[int] | None = None
    sampling: Sampling = Sampling()
    cache_tokens: int = 0
    logprobs: WantedLogprobs | None = None
    following: int | None = None

    @property
    def ends(self) -> bool:
        """Whether `sample` gives it a token, which is dropped for a part of a prompt that has log probabilities."""
        return self.samples or self.following is not None


class Rows(NamedTuple):
    """The rows of a place, which is a micro-batch whose requests change, in one step.

    Attributes:
        phase: the phase of all rows.
        rows: the rows in the order of their results.
        left: requests that have left the place since its last step; their blocks of the KV cache are free from now on.
    """

    phase: Phase
    rows: tuple[Row, ...]
    left: tuple[int, ...] = ()

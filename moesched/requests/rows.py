"""Rows of a step of continuous batching: one for each request that has new tokens in the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moesched.requests.logprobs import WantedLogprobs
from moesched.requests.sampling import Sampling
from moesched.tasks import Phase


class Row(NamedTuple):
    """The new tokens of one request in a step.

    Attributes:
        request: the request's number, which no other request has.
        start: number of the request's tokens before this step.
        tokens: number of new tokens in this step.
        generated: number of tokens generated for the request before this step.
        samples: whether a token is sampled after the new tokens.
        ids: ids of the new tokens; None in decode, where the new token is the one sampled last, and in simulations.
        sampling: the settings for choosing the request's tokens.
        cache_tokens: tokens that the request takes in the KV cache at the end, in whole blocks.
        logprobs: the log probabilities that the request asks for; None for none.
        following: id of the prompt's token after the new ones, if log probabilities of the prompt are wanted; None
            otherwise, and at the prompt's end.
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
        """True if the step's `sample` task returns a token for this row.

        If `samples` is False, the token only carries log probabilities of the prompt, and is dropped.
        """
        return self.samples or self.following is not None


class Rows(NamedTuple):
    """The rows of one step in a micro-batch that requests join and leave between steps.

    Attributes:
        phase: the phase of all rows.
        rows: the rows; the tokens that `sample` returns have the same order.
        departed: requests that left since the micro-batch's last step; their blocks of the KV cache are free now.
    """

    phase: Phase
    rows: tuple[Row, ...]
    departed: tuple[int, ...] = ()

"""Chooses tokens from logits; the randomness comes from seed, request and position, never the schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from moesched.errors import BadInput, NotFinite

Logits = npt.NDArray[np.floating[Any]]
Probabilities = npt.NDArray[np.float64]


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen: greedily at temperature 0, else at random by softmax(logits / temperature).

    top_k: only from the k most likely tokens. top_p: only from the fewest tokens that together have that
    probability, after top_k. Tokens as likely as the last one that is let in are let in too.
    beams: with more than one, by beam search (see `beams.py`) of that width; what has ended is compared by its log
    probability over its length to the power of length_penalty, and with early_stopping the search ends when as many
    sequences as there are beams have ended.
    Raises BadInput, naming the setting, where a value makes no sense.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise BadInput(f"temperature is {self.temperature}; give 0 for the likeliest token, or more")
        if self.top_k is not None and self.top_k < 1:
            raise BadInput(f"top-k is {self.top_k}; give 1 or more, or leave it out for all tokens")
        if not 0 < self.top_p <= 1:
            raise BadInput(f"top-p is {self.top_p}; give a probability above 0, at most 1")
        if not 0 <= self.seed < 2**64:
            raise BadInput(f"seed is {self.seed}; give a whole number from 0 to 2**64 - 1")
        if self.beams < 1:
            raise BadInput(f"beams is {self.beams}; give 1 for no beam search, or more")
        if self.beams > 1 and self.temperature:
            raise BadInput(
                f"temperature is {self.temperature}, but beam search draws nothing; leave one of the two out"
            )
        if not math.isfinite(self.length_penalty):
            raise BadInput(f"length-penalty is {self.length_penalty}; give a number, 0 for none")


def sample(
    logits_SV: Logits, sampling: Sampling, requests: Sequence[int], positions: Sequence[int]
) -> list[int]:
    """One token for each row of logits.

    requests: each row's index among all requests of the run. positions: the place that its token will have in
    its sequence. Raises NotFinite where logits are no numbers.
    """
    require_numbers(logits_SV, requests, positions)
    if sampling.temperature == 0:
        return [int(token) for token in logits_SV.argmax(axis=1)]
    return [
        _draw(probabilities(logits, sampling), uniform(sampling.seed, request, position))
        for logits, request, position in zip(logits_SV, requests, positions, strict=True)
    ]


def require_numbers(logits_SV: Logits, requests: Sequence[int], positions: Sequence[int]) -> None:
    """Raise NotFinite where logits are no numbers."""
    largest_S = logits_SV.max(axis=1)
    if not np.isfinite(largest_S).all():
        row = int(np.flatnonzero(~np.isfinite(largest_S))[0])
        raise NotFinite(f"the logits of request {requests[row]} at position {positions[row]} are no numbers")


def traced(error: NotFinite, step: int, first_bad: str) -> NotFinite:
    """The error of bad logits in a step (0 is prefill), with the tensor that the bad numbers began in."""
    when = f"decode step {step}" if step else "prefill"
    return NotFinite(
        f"{when}: {error}, and the first bad tensor is {first_bad}: generation stops there; "
        "copy the checkpoint again, or try --dtype float32"
    )


def uniform(seed: int, request: int, position: int) -> float:
    """The random number in [0, 1) of a token, from a counter-based generator."""
    bits = np.random.Philox(key=seed, counter=[0, 0, position, request])
    return float(np.random.Generator(bits).random())


def probabilities(logits_V: Logits, sampling: Sampling) -> Probabilities:
    """What each token is drawn with, at a temperature above 0; 0 where top_k or top_p leave it out."""
    with np.errstate(over="ignore"):
        scaled = (logits_V - logits_V.max()).astype(np.float64) / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scaled.size:
        scaled[scaled < np.partition(scaled, -sampling.top_k)[-sampling.top_k]] = -np.inf
    likely: Probabilities = np.exp(scaled)
    likely /= likely.sum()
    if sampling.top_p < 1:
        likely[likely < _least_likely(likely, sampling.top_p)] = 0
        likely /= likely.sum()
    return likely


def _least_likely(likely: Probabilities, top_p: float) -> float:
    """The probability of the last token that top_p lets in."""
    # All tokens below this together have less than what top_p leaves out: they need no sorting.
    candidates = likely[likely >= (1 - top_p) / likely.size]
    descending = np.sort(candidates)[::-1]
    last = int(np.searchsorted(np.cumsum(descending), top_p))
    return float(descending[min(last, descending.size - 1)])


def _draw(likely: Probabilities, number: float) -> int:
    """The token whose share of [0, 1) has the number."""
    ends = np.cumsum(likely)
    token = int(np.searchsorted(ends, number * ends[-1], side="right"))
    return min(token, int(np.flatnonzero(likely)[-1]))

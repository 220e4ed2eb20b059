"""Chooses tokens from logits; randomness depends on seed, request and position, never on the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moesched.errors import NotFinite
from moesched.requests.logprobs import Logprob
from moesched.requests.sampling import Sampling

Logits = npt.NDArray[np.floating[Any]]
Probabilities = npt.NDArray[np.float64]

NO_TOKEN = -1
"""The token of a row whose logits are not finite."""


def sample(
    logits_SV: Logits,
    sampling: Sampling | Sequence[Sampling],
    requests: Sequence[int],
    positions: Sequence[int],
) -> list[int]:
    """Choose a token for each row of logits.

    Args:
        logits_SV: logits (rows, vocabulary).
        sampling: the settings for all rows, or one for each row.
        requests: index of each row's request among all requests of the run.
        positions: position of each row's token in its sequence.

    Raises:
        NotFinite: logits are not finite.
    """
    require_finite(logits_SV, requests, positions)
    return sample_finite(logits_SV, sampling, requests, positions)


def sample_finite(
    logits_SV: Logits,
    sampling: Sampling | Sequence[Sampling],
    requests: Sequence[int],
    positions: Sequence[int],
    drawn_as: Sequence[int] | None = None,
) -> list[int]:
    """Choose tokens as `sample` does, but NO_TOKEN for each row whose logits are not finite.

    Args:
        drawn_as: for each row, an integer from which its random number is made, in place of the request's index; by
            default `requests`. Rows with equal seed, position and `drawn_as` get the same random number.
    """
    each = [sampling] * len(logits_SV) if isinstance(sampling, Sampling) else sampling
    likeliest = np.where(_are_finite(logits_SV), logits_SV.argmax(axis=1), NO_TOKEN)
    rows = zip(logits_SV, likeliest, each, drawn_as or requests, positions, strict=True)
    return [
        _draw(probabilities(logits, way), uniform(way.seed, number, position))
        if way.temperature and token != NO_TOKEN
        else int(token)
        for logits, token, way, number, position in rows
    ]


def require_finite(logits_SV: Logits, requests: Sequence[int], positions: Sequence[int]) -> None:
    """Raise NotFinite, which names request and position, unless the largest logit of each row is finite."""
    finite_S = _are_finite(logits_SV)
    if not finite_S.all():
        row = int(np.flatnonzero(~finite_S)[0])
        raise NotFinite(f"the logits of request {requests[row]} at position {positions[row]} are not finite")


def _are_finite(logits_SV: Logits) -> npt.NDArray[np.bool_]:
    """Return, for each row of logits, whether the row's largest logit is finite."""
    finite_S: npt.NDArray[np.bool_] = np.isfinite(logits_SV.max(axis=1))
    return finite_S


def traced(error: NotFinite, when: str, first_bad: str | None, dtype: str = "") -> NotFinite:
    """Return the error about bad logits, extended by the step and the first tensor that is not finite.

    Args:
        when: the step, in words.
        first_bad: the tensor, in words; None if the step, computed again, has no such tensor.
        dtype: dtype of the computation, on which the advice in the message depends.
    """
    if first_bad is None:
        return NotFinite(
            f"{when}: {error}, but are when the step is computed again without its kernels: generation stops there; "
            "leave out kernels of your own, or try others of `moesched list kernels`"
        )
    remedy = "copy the checkpoint again"
    if dtype == "float16":
        remedy = "float16 ends at 65,504: use --dtype float32, or bfloat16 on hardware that has it"
    elif dtype != "float32":
        remedy += ", or try --dtype float32"
    return NotFinite(
        f"{when}: {error}, and the first bad tensor is {first_bad}: generation stops there; {remedy}"
    )


def uniform(seed: int, request: int, position: int) -> float:
    """Return a random number in [0, 1) that depends only on the seed, the request and the position in the request."""
    bits = np.random.Philox(key=seed, counter=[0, 0, position, request])
    return float(np.random.Generator(bits).random())


def probabilities(logits_V: Logits, sampling: Sampling) -> Probabilities:
    """Return each token's probability at a temperature above 0; 0 for tokens that top_k or top_p exclude."""
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
    """Return the probability of the least likely token that top_p includes."""
    # Tokens below this threshold add up to less than 1 - top_p, so they need no sorting.
    candidates = likely[likely >= (1 - top_p) / likely.size]
    descending = np.sort(candidates)[::-1]
    last = int(np.searchsorted(np.cumsum(descending), top_p))
    return float(descending[min(last, descending.size - 1)])


def _draw(likely: Probabilities, number: float) -> int:
    """Return the index of the token whose share of [0, 1) contains the number."""
    ends = np.cumsum(likely)
    token = int(np.searchsorted(ends, number * ends[-1], side="right"))
    return min(token, int(np.flatnonzero(likely)[-1]))


def logprobs_of(logits_SV: Logits, tokens: Sequence[int], likeliest: int) -> list[Logprob]:
    """Return the log probability of one token for each row of logits, without temperature, top_k and top_p.

    Args:
        logits_SV: logits (rows, vocabulary).
        tokens: the token of each row.
        likeliest: the number of likeliest tokens to name for each row, with their log probabilities.
    """
    found = []
    for row_V, token in zip(logits_SV, tokens, strict=True):
        logits_V = row_V.astype(np.float64)
        largest = logits_V.max()
        normal = largest + np.log(np.exp(logits_V - largest).sum())
        ids = _likeliest(logits_V, likeliest)
        named = tuple((int(each), float(logits_V[each] - normal)) for each in ids)
        found.append(Logprob(float(logits_V[token] - normal), named))
    return found


def _likeliest(logits_V: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.intp]:
    """Return the ids of the largest logits, the largest first; of equal ones, the lowest id first."""
    count = min(count, len(logits_V))
    if count == 0:
        return np.empty(0, dtype=np.intp)
    least = np.partition(logits_V, -count)[-count]
    candidates = np.flatnonzero(logits_V >= least)
    return candidates[np.argsort(-logits_V[candidates], kind="stable")][:count]

"""Beam search, which keeps the likeliest continuations of a request, and the best finished ones.

The score of a sequence is the sum of its log probabilities; a finished sequence's sum is divided by its number of
generated tokens to the power of the length penalty. Selection and termination are as in Hugging Face's `generate`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from moesched.requests.sampling import Sampling

Logits = npt.NDArray[np.floating[Any]]


class Standing(NamedTuple):
    """State of a beam search: the best sequence so far, its score, and whether it is final."""

    tokens: tuple[int, ...]
    score: float
    done: bool


class Moves(NamedTuple):
    """For each beam after a step, the index of the earlier beam that it continues, and its new token."""

    parents: list[int]
    tokens: list[int]


class _Beam(NamedTuple):
    tokens: tuple[int, ...]
    score: np.float32


class BeamSearch:
    """The beam search of one request.

    Args:
        sampling: number of beams, length penalty, and whether the search stops once `beams` sequences are finished.
        stop_tokens: tokens that finish a sequence.
        most: the largest number of tokens to generate for a sequence.
    """

    def __init__(self, sampling: Sampling, stop_tokens: Collection[int], most: int) -> None:
        self._width = sampling.beams
        self._penalty = sampling.length_penalty
        self._early = sampling.early_stopping
        self._stop_tokens = frozenset(stop_tokens)
        self._most = most
        self._running = [_Beam((), np.float32(0))]
        self._ended: list[_Beam] = []
        self._done = False

    @property
    def standing(self) -> Standing:
        """The best finished sequence; while there is none, the likeliest running sequence."""
        if self._ended:
            tokens, score = self._ended[0]
        else:
            tokens, score = self._running[0]
            score = self._penalised(score, max(1, len(tokens)))
        return Standing(tokens, float(score), self._done)

    def advance(self, logits_SV: Logits) -> Moves:
        """Extend each beam by one token, given logits of shape (beams, vocabulary); the first call has a single beam.

        Once the search is done, each beam gets token 0, so that the number of beams stays the same.
        """
        if self._done:
            return Moves(list(range(self._width)), [0] * self._width)
        scores_SV = _log_softmax(logits_SV) + np.array([[beam.score] for beam in self._running], np.float32)
        best = _largest(scores_SV, max(2, 1 + len(self._stop_tokens)) * self._width)
        vocabulary = scores_SV.shape[1]
        candidates = [divmod(int(index), vocabulary) for index in best]
        beams = [
            _Beam((*self._running[parent].tokens, token), scores_SV[parent, token])
            for parent, token in candidates
        ]
        length = len(beams[0].tokens)
        ends = [length == self._most or token in self._stop_tokens for _, token in candidates]
        self._end([beam for beam, end in zip(beams[: self._width], ends, strict=False) if end], length)
        kept = [index for index, end in enumerate(ends) if not end] or list(range(len(beams)))
        kept = kept[: self._width]
        self._running = [beams[index] for index in kept]
        self._done = all(ends) or self._is_decided(length)
        return Moves([candidates[index][0] for index in kept], [candidates[index][1] for index in kept])

    def _end(self, beams: Sequence[_Beam], length: int) -> None:
        if self._early and len(self._ended) == self._width:
            return
        ended = [beam._replace(score=self._penalised(beam.score, length)) for beam in beams]
        self._ended = sorted(self._ended + ended, key=lambda beam: -beam.score)[: self._width]

    def _is_decided(self, length: int) -> bool:
        """Test whether the search ends now, by Hugging Face's rule; every running beam has `length` tokens."""
        if len(self._ended) < self._width:
            return False
        return self._early or bool(self._penalised(self._running[0].score, length) <= self._ended[-1].score)

    def _penalised(self, score: np.float32, length: int) -> np.float32:
        return np.float32(score / np.float32(length**self._penalty))


def _log_softmax(logits_SV: Logits) -> npt.NDArray[np.float32]:
    shifted = logits_SV.astype(np.float32) - logits_SV.max(axis=1, keepdims=True)
    log_probabilities: npt.NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return log_probabilities


def _largest(scores_SV: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int64]:
    """Return the indices of the `count` largest scores in the flattened array, largest first; ties by lower index."""
    flat = scores_SV.ravel()
    found = np.argpartition(flat, -count)[-count:] if count < flat.size else np.arange(flat.size)
    order = np.lexsort((found, -flat[found]))
    return found[order]

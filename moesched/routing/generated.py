"""Random expert choices by popularity, with optional temporal locality: seeded, and independent of the schedule."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.routing.choices import Integers
from moesched.routing.popularity import Floats, Popularity, layer_weights, shares_of

Bits = npt.NDArray[np.uint64]

ORDERS = 64
"""Number of random orders of a layer's experts; they differ in which experts are chosen together."""

_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_TABLE, _CHOICE, _REPEAT = range(3)


class _Table(NamedTuple):
    """The table from which a layer's experts are drawn: its experts in `ORDERS` random orders, one after the other.

    In each order, every expert has an interval on a line, as long as the share of tokens that choose the expert. The
    intervals of order n begin at n * (`top_k` + 1), have no gaps, and fill a length of `top_k`. A draw picks an order,
    and in its intervals `top_k` points at distances of 1. Each point chooses the expert whose interval it is in.

    Attributes:
        experts: expert ids (`ORDERS` * experts,).
        ends: the end of each expert's interval, in the order of `experts`.
    """

    experts: Integers
    ends: Floats


class GeneratedChoices:
    """Random choices of `top_k` different experts per token; `popularity` sets the share of tokens for each expert.

    With the probability `popularity.locality`, a token repeats the experts of the token before it in the same request
    and layer. This does not change the experts' shares.

    Raises:
        BadInput: the locality is not at least 0 and less than 1.
    """

    def __init__(self, popularity: Popularity, config: ModelConfig, seed: int = 0) -> None:
        self.locality = popularity.locality
        if not 0 <= self.locality < 1:
            raise BadInput(f"routing: locality is {self.locality:g}: give 0 or more, and less than 1")
        self.experts = config.routed.experts
        self._top_k = config.routed.top_k
        self._seed = seed
        self._shares_LE = shares_of(layer_weights(popularity, config, seed), config.routed.top_k)
        self._table = cache(self._make_table)
        self._start = cache(self._make_start)

    def of_tokens(self, layer: int, requests_T: Integers, positions_T: Integers) -> Integers:
        """Return the ids (T, top_k) of the experts that T tokens choose in a layer, ascending in each row.

        Args:
            requests_T: the index of each token's request.
            positions_T: each token's position in its request, from 0.
        """
        drawn_T = self._drawn_at(layer, requests_T, positions_T)
        order_T, rest_T = np.divmod(ORDERS * self._numbers(layer, _CHOICE, requests_T, drawn_T), 1.0)
        # Systematic sampling: every expert has an interval as long as its share, at most 1, so points at distances of 1
        # fall into different intervals, each with the right probability.
        start_T = order_T * (self._top_k + 1) + (1.0 - rest_T)
        table = self._table(layer)
        indices_Tk = np.searchsorted(table.ends, start_T[:, None] + np.arange(self._top_k))
        return np.sort(table.experts[indices_Tk], axis=1)

    def _drawn_at(self, layer: int, requests_T: Integers, positions_T: Integers) -> Integers:
        """Return, for each of T tokens, the position (T,) whose random draw decides its experts.

        This is the token's own position, unless the token repeats the one before it. Then it is the position that
        decides the experts of the token before. If even the request's first token repeats, the position is negative.
        """
        drawn_T = np.array(positions_T)
        unsettled = np.arange(len(drawn_T)) if self.locality else np.arange(0)
        while len(unsettled):
            at = drawn_T[unsettled]
            repeats = self._numbers(layer, _REPEAT, requests_T[unsettled], at) < self.locality
            unsettled = unsettled[repeats]
            drawn_T[unsettled] -= 1
        return drawn_T

    def _make_table(self, layer: int) -> _Table:
        random = np.random.default_rng((self._seed % 2**64, layer, _TABLE))
        experts = random.permuted(np.tile(np.arange(self.experts), (ORDERS, 1)), axis=1)
        ends = np.cumsum(self._shares_LE[layer][experts], axis=1)
        ends[:, -1] = self._top_k
        ends += np.arange(ORDERS)[:, None] * (self._top_k + 1)
        return _Table(experts.ravel(), ends.ravel())

    def _numbers(self, layer: int, purpose: int, requests_T: Integers, positions_T: Integers) -> Floats:
        """Return a random number in [0, 1) for each of T tokens (T,), a function of the seed and the arguments alone.

        Args:
            purpose: `_CHOICE` or `_REPEAT`, so that numbers for different uses differ.
        """
        bits_T = _mix(self._start(layer, purpose) + requests_T.astype(np.uint64) * _STRIDE)
        bits_T = _mix(bits_T + positions_T.astype(np.uint64) * _STRIDE)
        numbers: Floats = (bits_T >> np.uint64(11)).astype(np.float64) * 2.0**-53
        return numbers

    def _make_start(self, layer: int, purpose: int) -> Bits:
        random = np.random.default_rng((self._seed % 2**64, layer, purpose))
        return random.integers(2**64, size=1, dtype=np.uint64)


def _mix(bits: Bits) -> Bits:
    """Hash each number to a random-looking one (SplitMix64, Steele et al. 2014); returns the same shape."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Bits = bits ^ (bits >> np.uint64(31))
    return mixed

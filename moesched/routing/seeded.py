"""Uniform random routing, the default of simulations."""

from __future__ import annotations

import numpy as np


class SeededRouting:
    """Random choice of `top_k` different experts per token; the same arguments and seed give the same choice."""

    def __init__(self, experts: int, top_k: int, seed: int = 0) -> None:
        self.experts = experts
        self.top_k = top_k
        self.seed = seed % 2**64

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        """Return the number of the micro-batch's tokens that choose each expert of a layer, by expert id, ascending.

        Experts that no token chooses are left out.
        """
        drawn = np.random.default_rng((self.seed, step, layer, micro_batch)).random((tokens, self.experts))
        chosen = drawn.argpartition(self.top_k - 1, axis=1)[:, : self.top_k]
        counts = np.bincount(chosen.ravel(), minlength=self.experts).tolist()
        return {expert: count for expert, count in enumerate(counts) if count}

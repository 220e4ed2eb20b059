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
        """Count the tokens of each expert that gets any, in ascending order of expert."""
        drawn = np.random.default_rng((self.seed, step, layer, micro_batch)).random((tokens, self.experts))
        chosen = drawn.argpartition(self.top_k - 1, axis=1)[:, : self.top_k]
        counts = np.bincount(chosen.ravel(), minlength=self.experts).tolist()
        return {expert: count for expert, count in enumerate(counts) if count}

"""Routing without a router: which experts tokens take in a simulation."""

from __future__ import annotations

import random


class SeededRouting:
    """Uniform routing: each token takes `top_k` different experts. The same arguments and seed give the same choice."""

    def __init__(self, experts: int, top_k: int, seed: int = 0) -> None:
        self.experts = experts
        self.top_k = top_k
        self.seed = seed

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        """How many of the tokens go to each expert that gets any, in ascending order of expert."""
        drawn = random.Random(f"{self.seed}/{step}/{layer}/{micro_batch}")
        counts = [0] * self.experts
        for _ in range(tokens):
            for expert in drawn.sample(range(self.experts), self.top_k):
                counts[expert] += 1
        return {expert: count for expert, count in enumerate(counts) if count}

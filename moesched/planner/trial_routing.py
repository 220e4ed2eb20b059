"""Makes random routing for trial runs: equal choices for all policies, made quickly for many tokens."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from moesched.routing import SeededRouting

MANY_TOKENS = 512
"""From this number of tokens on, each expert's number of tokens is drawn, instead of each token's experts."""


class TrialRouting(SeededRouting):
    """Uniform random choices of experts, kept so that the trial runs of all policies get equal choices."""

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        """Return the number of tokens that choose each expert, by ascending expert; unchosen experts are left out."""
        return dict(_counts(self.experts, self.top_k, step, layer, micro_batch, tokens))


@lru_cache(maxsize=2048)
def _counts(experts: int, top_k: int, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
    if tokens < MANY_TOKENS:
        return SeededRouting(experts, top_k).choose(step, layer, micro_batch, tokens)
    draw = np.random.default_rng((step, layer, micro_batch))
    counts = draw.binomial(tokens, top_k / experts, experts)
    left = tokens * top_k - int(counts.sum())
    counts += left // experts
    counts[draw.permutation(experts)[: left % experts]] += 1
    return {expert: min(tokens, int(count)) for expert, count in enumerate(counts) if count > 0}

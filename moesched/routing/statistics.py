"""Statistics of a routing profile: popularity and hit rates, as in Twiddler's Appendix C."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from moesched.errors import BadInput
from moesched.routing.profile import RoutingProfile

PAPERS_SHARES = (56 / 256, 125 / 256)
"""Shares of all experts that fit on the GPU in the paper's two environments."""


class HitRate(msgspec.Struct, frozen=True):
    """Probability that a token finds an expert on a GPU that holds `gpu_experts` of them.

    Attributes:
        best, worst: the probability with the most popular, and with the least popular, experts on the GPU.
        random: the mean probability with random experts on the GPU.
    """

    gpu_experts: int
    best: float
    worst: float
    random: float


class RoutingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the popularity of all experts of all layers, relative to the most popular expert."""

    model: str
    layers: int
    experts: int
    top_k: int
    tokens: int
    mean: float
    deviation: float
    minimum: float
    lower_quartile: float
    median: float
    upper_quartile: float
    hit_rates: tuple[HitRate, ...]


def statistics_of(profile: RoutingProfile, gpu_experts: Sequence[int] = ()) -> RoutingStatistics:
    """Compute the statistics of Appendix C, over layers with experts.

    Args:
        gpu_experts: numbers of experts on the GPU for the hit rates; by default the paper's two shares of all experts.

    Raises:
        BadInput: the profile has no tokens, or the model has fewer experts than one of the numbers.
    """
    routed = [counts for counts in profile.counts if any(counts)]
    ascending = np.sort(np.array(routed, dtype=np.float64), axis=None)
    if not routed:
        raise BadInput(f"the routing profile of {profile.model} has no tokens: profile some prompts")
    popularity = ascending / ascending[-1]
    lower, median, upper = np.percentile(popularity, (25, 50, 75))
    chosen = gpu_experts or [round(share * popularity.size) for share in PAPERS_SHARES]
    return RoutingStatistics(
        model=profile.model,
        layers=profile.layers,
        experts=profile.experts,
        top_k=profile.top_k,
        tokens=profile.tokens,
        mean=float(popularity.mean()),
        deviation=float(popularity.std()),
        minimum=float(popularity[0]),
        lower_quartile=float(lower),
        median=float(median),
        upper_quartile=float(upper),
        hit_rates=tuple(_hit_rate(ascending.tolist(), count) for count in chosen),
    )


def _hit_rate(ascending: list[float], gpu_experts: int) -> HitRate:
    most = len(ascending)
    if not 0 <= gpu_experts <= most:
        raise BadInput(f"--gpu-experts is {gpu_experts}: the model has {most} experts; give 0 to {most}")
    total = sum(ascending)
    best, worst = sum(ascending[most - gpu_experts :]), sum(ascending[:gpu_experts])
    return HitRate(gpu_experts, best / total, worst / total, gpu_experts / most)

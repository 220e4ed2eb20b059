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
    """The probability that an expert which a token chooses is on a GPU that holds some of the model's experts.

    Attributes:
        gpu_experts: number of experts on the GPU, over all layers.
        best, worst: the probability if the GPU holds the most popular experts, and if it holds the least popular ones.
        random: the mean probability if the GPU's experts are chosen at random.
    """

    gpu_experts: int
    best: float
    worst: float
    random: float


class RoutingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a profile.

    Attributes:
        model, layers, experts, top_k, tokens: as in the profile.
        routed_layers: number of layers with experts.
        mean, deviation, minimum, lower_quartile, median, upper_quartile: statistics of the popularity of all experts in
            all layers with experts, relative to the most popular expert.
        hit_rates: one for each number of experts on the GPU.
    """

    model: str
    layers: int
    routed_layers: int
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
    """Compute the experts' popularity and the hit rates of GPUs that hold some experts, as in Twiddler's Appendix C.

    Args:
        gpu_experts: numbers of experts on the GPU, over all layers, one for each hit rate; if empty, those shares of
            all experts that fit on the GPU in the paper's two environments (`PAPERS_SHARES`).

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
        routed_layers=len(routed),
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

"""What a profile says of popularity and of hit rates: the figures of Twiddler's Appendix C."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from moesched.errors import BadInput
from moesched.routing.profile import RoutingProfile

PAPERS_SHARES = (56 / 256, 125 / 256)
"""Of all experts, those that the GPUs of the paper's two environments hold."""


class HitRate(msgspec.Struct, frozen=True):
    """How likely a token is to find an expert on the GPU that holds so many of them.

    Attributes:
        best, worst: with the most popular experts there, and with the least popular.
        random: with any, on average.
    """

    gpu_experts: int
    best: float
    worst: float
    random: float


class RoutingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Popularity over all experts of all layers; the most popular one has 1."""

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
    """The figures of Appendix C.

    Args:
        gpu_experts: for how many experts on the GPU the hit rates are; by default the paper's two shares of all.

    Raises:
        BadInput: nothing was counted, or the model has fewer experts.
    """
    ascending = np.sort(np.array(profile.counts, dtype=np.float64), axis=None)
    if not ascending[-1]:
        raise BadInput(f"the routing profile of {profile.model} has counted no token: profile some prompts")
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

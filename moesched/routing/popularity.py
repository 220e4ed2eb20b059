"""Popularity of experts: generated from a seed, or counted in a profile.

Popularity is relative to the other experts of a layer: each token chooses `top_k` experts in every layer, so the number
of choices is the same for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.routing.checks import layers_without_experts
from moesched.routing.profile import RoutingProfile

Floats = npt.NDArray[np.float64]

MIXTRAL_RANKS = (0, 2, 14, 15, 36, 64, 96, 128, 160, 191, 228, 229, 250, 255)
MIXTRAL_VALUES = (
    *(0.22, 0.59, 0.597, 0.603, 0.625, 0.67, 0.683),
    *(0.714, 0.722, 0.759, 0.797, 0.803, 0.867, 1.0),
)
"""Popularity of Mixtral 8x7B's 256 experts, from the least popular (rank 0) to the most popular, which has 1.

Twiddler (Appendix C) prints statistics, not values. The line through these points has all these statistics: mean,
deviation, minimum, quartiles, 15 experts below 0.6 and 27 above 0.8, and the hit rates.
"""

ROUNDING = 1e-12
"""Differences up to this are rounding errors."""


class Popularity(Protocol):
    """A source of the experts' popularity, by which random choices of experts are generated."""

    @property
    def locality(self) -> float:
        """Probability that a token repeats the experts of the previous token of its request in the same layer."""

    def weights(self, layers: int, experts: int, seed: int) -> Floats:
        """Return each expert's popularity (layers, experts): at least 0, relative to the other experts of the layer."""


@dataclass(frozen=True)
class Uniform:
    """Equal popularity of all experts."""

    locality: float = 0.0

    def weights(self, layers: int, experts: int, seed: int) -> Floats:
        """Return ones (layers, experts)."""
        return np.ones((layers, experts))


@dataclass(frozen=True)
class LikeMixtral:
    """Popularity like Mixtral 8x7B's on ShareGPT (Twiddler, Appendix C), for any number of layers and experts."""

    locality: float = 0.0

    def weights(self, layers: int, experts: int, seed: int) -> Floats:
        """Return values (layers, experts) of the paper's distribution, placed so that layers have nearly equal sums."""
        ranks = np.linspace(MIXTRAL_RANKS[0], MIXTRAL_RANKS[-1], layers * experts)
        values = np.interp(ranks, MIXTRAL_RANKS, MIXTRAL_VALUES)
        dealt = np.random.default_rng(seed % 2**64).permutation(values).reshape(layers, experts)
        _level(dealt)
        return dealt


@dataclass(frozen=True)
class Zipf:
    """Popularity 1 / rank ** exponent, with ranks assigned at random in each layer."""

    exponent: float = 1.0
    locality: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.exponent <= 100:
            raise BadInput(f"routing zipf: exponent is {self.exponent:g}: give a number from 0 to 100")

    def weights(self, layers: int, experts: int, seed: int) -> Floats:
        """Return the popularities (layers, experts), in a random order in each layer."""
        ranked = np.tile(np.arange(1.0, experts + 1) ** -self.exponent, (layers, 1))
        return np.random.default_rng(seed % 2**64).permuted(ranked, axis=1)


@dataclass(frozen=True)
class CountedPopularity:
    """Popularity as counted in a profile."""

    profile: RoutingProfile
    locality: float = 0.0

    def weights(self, layers: int, experts: int, seed: int) -> Floats:
        """Return the counts of the profile (layers, experts)."""
        return np.array(self.profile.counts, dtype=np.float64)


GENERATORS: dict[str, type[Uniform | LikeMixtral | Zipf]] = {
    "uniform": Uniform,
    "popularity": LikeMixtral,
    "zipf": Zipf,
}
"""Sources that need no file, by name."""


def shares_of(weights_LE: Floats, top_k: int) -> Floats:
    """Convert weights (layers, experts) to the share of tokens that choose each expert, in an array of the same shape.

    A share is at most 1, and the shares of a layer sum to `top_k`. An expert whose weight would give it a share above 1
    gets 1, and the other experts divide the rest by their weights.

    Raises:
        BadInput: a layer has fewer than `top_k` experts with a weight above 0.
    """
    return np.array([_shares(layer, weights_E, top_k) for layer, weights_E in enumerate(weights_LE)])


def layer_weights(popularity: Popularity, config: ModelConfig, seed: int) -> Floats:
    """Return the popularity of a model's experts (layers, experts), with equal values in layers without experts."""
    weights_LE = popularity.weights(config.layers, config.routed.experts, seed)
    weights_LE[layers_without_experts(config)] = 1.0
    return weights_LE


def expected_profile(popularity: Popularity, config: ModelConfig, seed: int, tokens: int) -> RoutingProfile:
    """Make the profile to expect after `tokens` tokens with a popularity: counts are shares times tokens, rounded."""
    shares_LE = shares_of(layer_weights(popularity, config, seed), config.routed.top_k)
    counts_LE = np.rint(shares_LE * tokens).astype(np.int64)
    counts_LE[layers_without_experts(config)] = 0
    return RoutingProfile(
        model=config.name,
        layers=config.layers,
        experts=config.routed.experts,
        top_k=config.routed.top_k,
        tokens=tokens,
        counts=tuple(tuple(row) for row in counts_LE.tolist()),
    )


def _shares(layer: int, weights_E: Floats, top_k: int) -> Floats:
    if np.count_nonzero(weights_E) < top_k:
        raise BadInput(
            f"routing: {np.count_nonzero(weights_E)} experts of layer {layer} are ever chosen, but each token takes "
            f"{top_k}: profile more tokens"
        )
    full = np.zeros(len(weights_E), dtype=bool)
    while True:
        rest = np.where(full, 0.0, weights_E)
        left = top_k - np.count_nonzero(full)
        shares_E = np.where(full, 1.0, rest * (left / rest.sum() if left else 0.0))
        if not (shares_E > 1).any():
            return shares_E
        full |= shares_E > 1


def _level(dealt_LE: Floats) -> None:
    """Swap single values between layers, in place, until no swap brings the layers' sums closer to their mean.

    Args:
        dealt_LE: values (layers, experts).
    """
    while True:
        over_L = dealt_LE.sum(axis=1) - dealt_LE.sum() / len(dealt_LE)
        worst = int(np.abs(over_L).argmax())
        moved_ELE = dealt_LE[worst][:, None, None] - dealt_LE
        # Half the change of the sum of squared deviations from the mean, for each possible swap.
        change_ELE = moved_ELE * (moved_ELE + over_L[:, None] - over_L[worst])
        give, layer, take = np.unravel_index(int(change_ELE.argmin()), change_ELE.shape)
        if change_ELE[give, layer, take] > -ROUNDING:
            return
        dealt_LE[worst, give], dealt_LE[layer, take] = dealt_LE[layer, take], dealt_LE[worst, give]

"""The rotary embedding (RoPE, Su et al. 2021, arXiv 2104.09864): which entries of a head are rotated, and how fast.

Scalings slow the rotation down for contexts longer than in training. Their fields have the names that config.json gives
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

SMALLEST_FACTOR = 2.0**-64
"""Least factor of a single pair with which the pair's angles do not overflow float32."""


class Slowing(msgspec.Struct, frozen=True, kw_only=True, tag_field="rope_type"):
    """A scaling of a rotary embedding, for contexts longer than in training.

    Attributes:
        factor: ratio of the new context length to the context length in training.
    """

    factor: float

    @property
    def magnitude(self) -> float:
        """Number that multiplies the cosines and sines."""
        return 1.0

    def problem(self, pairs: int) -> str:
        """Return the reason why a head with `pairs` rotated pairs cannot have this scaling; empty if it can."""
        return ""


class Linear(Slowing, frozen=True, kw_only=True, tag="linear"):
    """Scaling that rotates all pairs slower by `factor` (position interpolation, Chen et al., arXiv 2306.15595)."""

    def slowed(self, frequencies: Sequence[float]) -> list[float]:
        """Return the ratio of scaled to unscaled frequency of each pair, given the unscaled frequencies."""
        return [1 / self.factor] * len(frequencies)


class Llama3(Slowing, frozen=True, kw_only=True, tag="llama3"):
    """Scaling that slows down pairs of entries that turn few times within the training context (Llama 3.1).

    Pairs with fewer turns than `low_freq_factor` are slowed down by `factor`, pairs with more turns than
    `high_freq_factor` not at all, and pairs between by less than `factor`.
    """

    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def slowed(self, frequencies: Sequence[float]) -> list[float]:
        """Return the ratio of scaled to unscaled frequency of each pair, given the unscaled frequencies."""
        span = self.high_freq_factor - self.low_freq_factor
        turns = (self.original_max_position_embeddings * each / (2 * math.pi) for each in frequencies)
        kept = (min(1.0, max(0.0, (each - self.low_freq_factor) / span)) for each in turns)
        return [share + (1 - share) / self.factor for share in kept]

    def problem(self, pairs: int) -> str:
        """Return the reason why the fields cannot be used together; empty if they can. `pairs` is not used."""
        low, high = self.low_freq_factor, self.high_freq_factor
        if low < high:
            return ""
        return f"low_freq_factor is {low:g} and high_freq_factor {high:g}, but the first must be smaller"


class Yarn(Slowing, frozen=True, kw_only=True, tag="yarn"):
    """Scaling by a pair's number of turns within the training context (YaRN, Peng et al. 2023, arXiv 2309.00071).

    Pairs of entries with more than `beta_fast` turns keep their frequency, pairs with fewer than `beta_slow` are slowed
    down by `factor`; between, the ratio of frequencies falls linearly from pair to pair.

    Attributes:
        attention_factor: number that multiplies cosines and sines, so that attention scores grow with its square; None
            derives it from `factor`, `mscale` and `mscale_all_dim`.
        truncate: whether the two pair indices between which the ratio falls, computed as fractions, are rounded
            outwards to whole numbers.
    """

    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        """Number that multiplies the cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    def slowed(self, frequencies: Sequence[float]) -> list[float]:
        """Return the ratio of scaled to unscaled frequency of each pair, given the unscaled frequencies."""
        pairs = len(frequencies)
        first, last = self._pair(self.beta_fast, frequencies), self._pair(self.beta_slow, frequencies)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        width = last - first or 0.001
        shares = (min(1.0, max(0.0, (number - first) / width)) for number in range(pairs))
        return [1 - share + share / self.factor for share in shares]

    def problem(self, pairs: int) -> str:
        """Return the reason why the fields cannot be used together; empty if they can. `pairs` is not used."""
        slow, fast = self.beta_slow, self.beta_fast
        if slow < fast:
            return ""
        return f"beta_slow is {slow:g} and beta_fast {fast:g}, but the first must be smaller"

    def _growth(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

    def _pair(self, turns: float, frequencies: Sequence[float]) -> float:
        """Return the index, with a fraction, of the pair that makes `turns` full turns within the training context."""
        log_step = -math.log(frequencies[-1]) / (len(frequencies) - 1) if len(frequencies) > 1 else 1.0
        return math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / log_step


class LongRope(Slowing, frozen=True, kw_only=True, tag="longrope"):
    """Scaling that slows each pair down by its own factor (LongRoPE, Ding et al. 2024, arXiv 2402.13753).

    A model whose context is longer than in training has the long factors at every position, so that a cached key stays
    valid when its sequence grows.

    Attributes:
        factor: ratio of the longest context to the context length of the training; `magnitude` grows with it.
        max_position_embeddings: length of the longest context in tokens.
        long_factor: for each pair, the number that divides its frequency, in models whose context is longer than in
            training.
        short_factor: for each pair, the number that divides its frequency, in all other models.
        attention_factor: number that multiplies cosines and sines; None derives it from `factor`.
    """

    long_factor: tuple[float, ...]
    short_factor: tuple[float, ...]
    max_position_embeddings: int
    original_max_position_embeddings: int
    attention_factor: float | None = None

    @property
    def magnitude(self) -> float:
        """Number that multiplies the cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))

    def slowed(self, frequencies: Sequence[float]) -> list[float]:
        """Return the ratio of scaled to unscaled frequency of each pair, given the unscaled frequencies."""
        is_longer = self.max_position_embeddings > self.original_max_position_embeddings
        return [1 / each for each in (self.long_factor if is_longer else self.short_factor)]

    def problem(self, pairs: int) -> str:
        """Return the reason why a head with `pairs` rotated pairs cannot have this scaling; empty if it can."""
        if self.original_max_position_embeddings == 1:
            return "original_max_position_embeddings is 1, but contexts of the training were longer"
        for name, factors in (("long_factor", self.long_factor), ("short_factor", self.short_factor)):
            if len(factors) != pairs:
                return f"{name} has {len(factors):,} numbers, but {pairs:,} pairs of a head turn"
            for each in factors:
                if not SMALLEST_FACTOR <= each <= 1 / SMALLEST_FACTOR:
                    return f"{name} has {each:g}, but float32 overflows or loses it"
        return ""


Scaling = Linear | Llama3 | Yarn | LongRope


class Rotary(msgspec.Struct, frozen=True, kw_only=True):
    """A rotary embedding of queries and keys.

    Attributes:
        theta: base of the frequencies.
        width: number of a head's entries that are rotated, from the first on; None for all.
        interleaved: whether entries 2i and 2i + 1 make a pair, instead of i and i + width / 2.
        scaling: slower rotation for longer contexts; None for none.
    """

    theta: float = 1e4
    width: int | None = None
    interleaved: bool = False
    scaling: Scaling | None = None

    def turning(self, head_dim: int) -> int:
        """Return the number of rotated entries of a head with `head_dim` entries."""
        return head_dim if self.width is None else self.width

    def slowed(self, head_dim: int) -> list[float]:
        """Return, for each pair, the ratio of its frequency to its frequency without scaling; empty without scaling."""
        if self.scaling is None:
            return []
        width = self.turning(head_dim)
        return self.scaling.slowed([self.theta ** (-entry / width) for entry in range(0, width, 2)])

    @property
    def magnitude(self) -> float:
        """Number that multiplies the cosines and sines."""
        return 1.0 if self.scaling is None else self.scaling.magnitude

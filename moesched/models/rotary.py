"""The rotary embedding (RoPE, Su et al. 2021, arXiv 2104.09864): which entries of a head turn, and how fast.

Scalings slow the rotation down for contexts longer than those of the training. Their fields have the names that
config.json gives them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

SMALLEST_FACTOR = 2.0**-64
"""Least factor of a single pair with which float32 still has the pair's angles."""


class Slowing(msgspec.Struct, frozen=True, kw_only=True, tag_field="rope_type"):
    """A scaling of a rotary embedding, for contexts longer than those of the training.

    Attributes:
        factor: how many times longer contexts become.
    """

    factor: float

    @property
    def magnitude(self) -> float:
        """The number that multiplies cosines and sines."""
        return 1.0

    def problem(self, pairs: int) -> str:
        """The reason why a head of which `pairs` pairs turn cannot have this scaling; empty if it can."""
        return ""


class Linear(Slowing, frozen=True, kw_only=True, tag="linear"):
    """Every pair turns `factor` times slower (position interpolation, Chen et al. 2023, arXiv 2306.15595)."""

    def slowed(self, frequencies: Sequence[float]) -> list[float]:
        """The ratio of each pair's frequency to its frequency without scaling."""
        return [1 / self.factor] * len(frequencies)


class Llama3(Slowing, frozen=True, kw_only=True, tag="llama3"):
    """Pairs turn slower if they turn less than `high_freq_factor` times in a context of the training (Llama 3.1).

    Those that turn less than `low_freq_factor` times are slowed down by `factor`, those between by less.
    """

    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def slowed(self, frequencies: Sequence[float]) -> list[float]:
        """The ratio of each pair's frequency to its frequency without scaling."""
        span = self.high_freq_factor - self.low_freq_factor
        turns = (self.original_max_position_embeddings * each / (2 * math.pi) for each in frequencies)
        kept = (min(1.0, max(0.0, (each - self.low_freq_factor) / span)) for each in turns)
        return [share + (1 - share) / self.factor for share in kept]

    def problem(self, pairs: int) -> str:
        """The reason why this scaling is impossible; empty if it is possible."""
        low, high = self.low_freq_factor, self.high_freq_factor
        if low < high:
            return ""
        return f"low_freq_factor is {low:g} and high_freq_factor {high:g}, but the first must be smaller"


class Yarn(Slowing, frozen=True, kw_only=True, tag="yarn"):
    """Pairs turn slower by their turns in a context of the training (YaRN, Peng et al. 2023, arXiv 2309.00071).

    Those with more than `beta_fast` turns keep their frequency, those with fewer than `beta_slow` are slowed down by
    `factor`, and between these the share grows from pair to pair.

    Attributes:
        attention_factor: multiplies cosines and sines, so that scores grow with its square; None derives it from
            `factor`, `mscale` and `mscale_all_dim`.
        truncate: whether the share grows between whole pairs.
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
        """The number that multiplies cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    def slowed(self, frequencies: Sequence[float]) -> list[float]:
        """The ratio of each pair's frequency to its frequency without scaling."""
        pairs = len(frequencies)
        first, last = self._pair(self.beta_fast, frequencies), self._pair(self.beta_slow, frequencies)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * pairs - 1)
        width = last - first or 0.001
        shares = (min(1.0, max(0.0, (number - first) / width)) for number in range(pairs))
        return [1 - share + share / self.factor for share in shares]

    def problem(self, pairs: int) -> str:
        """The reason why this scaling is impossible; empty if it is possible."""
        slow, fast = self.beta_slow, self.beta_fast
        if slow < fast:
            return ""
        return f"beta_slow is {slow:g} and beta_fast {fast:g}, but the first must be smaller"

    def _growth(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

    def _pair(self, turns: float, frequencies: Sequence[float]) -> float:
        """The index, with a fraction, of the pair that makes `turns` full turns in a context of the training."""
        log_step = -math.log(frequencies[-1]) / (len(frequencies) - 1) if len(frequencies) > 1 else 1.0
        return math.log(self.original_max_position_embeddings / (turns * 2 * math.pi)) / log_step


class LongRope(Slowing, frozen=True, kw_only=True, tag="longrope"):
    """Each pair turns slower by a factor of its own (LongRoPE, Ding et al. 2024, arXiv 2402.13753).

    A model whose context is longer than that of its training has the long factors at every position: a cached key stays
    right when its sequence grows, and rows do not depend on each other.

    Attributes:
        factor: the longest context over that of the training; it also sets the magnitude.
        long_factor, short_factor: for each pair how much slower it turns, for contexts beyond those of the training,
            and for others.
        attention_factor: multiplies cosines and sines; None derives it from `factor`.
    """

    long_factor: tuple[float, ...]
    short_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float | None = None

    @property
    def magnitude(self) -> float:
        """The number that multiplies cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))

    def slowed(self, frequencies: Sequence[float]) -> list[float]:
        """The ratio of each pair's frequency to its frequency without scaling."""
        return [1 / each for each in (self.long_factor if self.factor > 1 else self.short_factor)]

    def problem(self, pairs: int) -> str:
        """The reason why a head of which `pairs` pairs turn cannot have this scaling; empty if it can."""
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
    """A rotary embedding; only kernels need it.

    Attributes:
        theta: base of the frequencies.
        width: entries of a head that turn, the first ones; None for all.
        interleaved: whether entries 2i and 2i + 1 make a pair, instead of i and i + width / 2.
        scaling: slows the rotation down for longer contexts.
    """

    theta: float = 1e4
    width: int | None = None
    interleaved: bool = False
    scaling: Scaling | None = None

    def turning(self, head_dim: int) -> int:
        """Number of entries of a head that turn."""
        return head_dim if self.width is None else self.width

    def slowed(self, head_dim: int) -> list[float]:
        """The ratio of each pair's frequency to its frequency without scaling; empty without scaling."""
        if self.scaling is None:
            return []
        width = self.turning(head_dim)
        return self.scaling.slowed([self.theta ** (-entry / width) for entry in range(0, width, 2)])

    @property
    def magnitude(self) -> float:
        """The number that multiplies cosines and sines."""
        return 1.0 if self.scaling is None else self.scaling.magnitude

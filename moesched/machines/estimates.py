"""Estimates, with their sources, of rates that were not measured on the machine itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Level = Literal["low", "expected", "high"]
Positive = Annotated[float, Meta(gt=0, lt=1e30)]


class Estimate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Estimate of a rate that kernels or copies reach, or of a duration: the expected figure, and a range around it.

    With most programs, the figure is between `low` and `high`.

    Attributes:
        low, expected, high: ascending figures; for a rate, shares of the rate that the machine's file states; for a
            duration, seconds.
        source: a publication, a vendor's note, or the word "assumed" and the reason.
    """

    low: Positive
    expected: Positive
    high: Positive
    source: str = ""

    def at(self, level: Level) -> float:
        """Return the low, expected or high figure."""
        return {"low": self.low, "expected": self.expected, "high": self.high}[level]


def estimate_problems(key: str, estimate: Estimate) -> Iterator[str]:
    """Yield sentences on what is wrong with an estimate; each begins with the estimate's key in the file.

    Args:
        key: key of the estimate, such as "processors.gpu.rates.products".
    """
    if estimate.low > estimate.high:
        yield f"{key}: low is {estimate.low:g} and high is {estimate.high:g}: exchange them"
    elif not estimate.low <= estimate.expected <= estimate.high:
        yield (
            f"{key}.expected is {estimate.expected:g}: give a figure from low, {estimate.low:g}, "
            f"to high, {estimate.high:g}"
        )

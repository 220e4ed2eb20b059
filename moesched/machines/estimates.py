"""Estimates of rates that were not measured on the machine itself, and where they come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Level = Literal["low", "expected", "high"]
Positive = Annotated[float, Meta(gt=0, lt=1e30)]


class Estimate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A rate that kernels or copies sustain: the figure expected, and the range that most programs stay in.

    Attributes:
        low, expected, high: in this order; of a rate a share of the stated one, of a duration seconds.
        source: a publication, a vendor's note, or the word "assumed" and the reason.
    """

    low: Positive
    expected: Positive
    high: Positive
    source: str = ""

    def at(self, level: Level) -> float:
        """The figure at one end or in the middle."""
        return {"low": self.low, "expected": self.expected, "high": self.high}[level]


def estimate_problems(key: str, estimate: Estimate) -> Iterator[str]:
    """The problems of an estimate; each begins with its key."""
    if estimate.low > estimate.high:
        yield f"{key}: low is {estimate.low:g} and high is {estimate.high:g}: exchange them"
    elif not estimate.low <= estimate.expected <= estimate.high:
        yield (
            f"{key}.expected is {estimate.expected:g}: give a figure from low, {estimate.low:g}, "
            f"to high, {estimate.high:g}"
        )

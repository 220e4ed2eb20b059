"""A claim of docs/results.md: a figure of a result file, and its bar."""

from __future__ import annotations

from typing import Any, NamedTuple

Result = dict[str, Any]


class Claim(NamedTuple):
    """A figure and its bar.

    Attributes:
        reached: whether the bar is; None if there is no bar.
    """

    words: str
    figure: str
    bar: str = ""
    reached: bool | None = None


def at_most(words: str, figure: float, bar: float, form: str = "{:g}") -> Claim:
    """A figure that is not to be larger than its bar."""
    return Claim(words, form.format(figure), f"≤ {form.format(bar)}", figure <= bar)


def at_least(words: str, figure: float, bar: float, form: str = "{:g}") -> Claim:
    """A figure that is not to be smaller than its bar."""
    return Claim(words, form.format(figure), f"≥ {form.format(bar)}", figure >= bar)


def all_of(words: str, count: int, total: int) -> Claim:
    """A count that is to be all."""
    return Claim(words, f"{count:,} of {total:,}", "all", count == total)


def none_of(words: str, count: int, total: int) -> Claim:
    """A count that is to be none."""
    return Claim(words, f"{count:,} of {total:,}", "none", count == 0)


def together(words: str, *claims: Claim) -> Claim:
    """Several claims in one line."""
    figures, bars = (
        ", ".join(texts) for texts in zip(*[(each.figure, each.bar) for each in claims], strict=True)
    )
    return Claim(words, figures, bars, all(each.reached for each in claims))

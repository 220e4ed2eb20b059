"""Results of a reproduction: sections of rows, and statements of the paper beside ours."""

from __future__ import annotations

from pathlib import Path

import msgspec

from moesched.system.whole_file import write_json

Value = str | float | int | bool | None

NEAR = 0.2
OVERLAP = 0.5
AGREEMENT = "A figure agrees within 20 %; two ranges agree where at least half of each lies in the other."
"""The definition of `agrees`, for readers."""


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A statement of a paper beside ours.

    Attributes:
        agrees: whether ours agrees with the paper's (see `AGREEMENT`).
        because: reason that agreement means little, such as a fit or errors that cancel; empty otherwise.
    """

    where: str
    what: str
    paper: str
    ours: str
    agrees: bool
    because: str = ""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the reproduction.

    Attributes:
        how: what was done, in a few sentences.
        rows: a table; all rows have the same keys.
        notes: remarks on the section.
    """

    name: str
    title: str
    how: str
    rows: list[dict[str, Value]]
    claims: list[Claim] = []
    notes: list[str] = []


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of the predicted cells.

    Attributes:
        median_error: median of the absolute relative errors.
        pairs, wrong: pairs of a column more than 20 % apart in the paper, and those of them in the wrong order.
    """

    cells: int
    median_error: float
    pairs: int
    wrong: list[str]


class Reproduction(msgspec.Struct, frozen=True, kw_only=True):
    """A paper beside our predictions: nothing in it was measured by us.

    Attributes:
        calibration: the rates that the paper does not give, each set by one of its cells.
        accuracy: of the tables' predicted cells; None where no table was asked for. `as_drawn` has
            FlexGen's schedule of the paper's Fig. 6; `sustained` has the profiles' sustained rates, and no fit.
    """

    paper: str
    title: str
    calibration: list[dict[str, Value]]
    accuracy: Accuracy | None
    accuracy_as_drawn: Accuracy | None
    sections: list[Section]
    wall_seconds: float
    accuracy_sustained: Accuracy | None = None


def write_reproduction(report: Reproduction, path: Path) -> None:
    """Write a reproduction as JSON.

    Raises:
        BadInput: the file cannot be written; nothing is left of it.
    """
    write_json(path, "report", report)


def agrees(paper: tuple[float, float], ours: tuple[float, float]) -> bool:
    """Test whether two figures or ranges, each from its lowest to its highest value, agree as `AGREEMENT` says."""
    (low, high), (least, most) = paper, ours
    if low < high and least < most:
        return min(high, most) - max(low, least) >= OVERLAP * max(high - low, most - least)
    return least <= high * (1 + NEAR) and most >= low * (1 - NEAR)


def span(low: float, high: float) -> str:
    """Format a ratio, or a range of ratios."""
    first, last = f"{low:.3g}", f"{high:.3g}"
    return f"{first}x" if first == last else f"{first} to {last}x"


def rounded(number: float) -> float:
    """Round to four significant digits."""
    return float(f"{number:.4g}")

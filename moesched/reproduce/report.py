"""Results of a reproduction: sections of rows, and claims of the paper with our results beside them."""

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
    """A statement of a paper, and our result beside it.

    Attributes:
        where: section of the paper.
        what: the statement's subject.
        paper, ours: the paper's figure and ours, in words.
        agrees: whether ours agrees with the paper's (see `AGREEMENT`).
        because: the reason why agreement means little, such as a fit or errors that cancel; empty if there is none.
    """

    where: str
    what: str
    paper: str
    ours: str
    agrees: bool
    because: str = ""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """One table, figure or topic of a reproduction.

    Attributes:
        how: a description of how the rows were computed, in a few sentences.
        rows: rows of a table, all with the same keys.
        claims: statements of the paper on this topic, with our results.
        notes: remarks on the section.
    """

    name: str
    title: str
    how: str
    rows: list[dict[str, Value]]
    claims: list[Claim] = []
    notes: list[str] = []


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of the predicted cells of a paper's tables.

    Attributes:
        cells: number of predicted cells, without cells that a rate was fitted to.
        median_error: median of the absolute relative errors.
        pairs: number of pairs of systems in one column that are more than 20 % apart in the paper.
        wrong: those of these pairs that our predictions put in the other order, in words.
    """

    cells: int
    median_error: float
    pairs: int
    wrong: list[str]


class Reproduction(msgspec.Struct, frozen=True, kw_only=True):
    """A paper's figures beside ours, which are all predicted and not measured.

    Attributes:
        calibration: a row for each rate that the paper does not give, with its source or the figure it was fitted to.
        accuracy: errors of the tables' predicted cells; None if the tables' sections were not made.
        accuracy_as_drawn: the errors with FlexGen's schedule as MoE-Lightning's Fig. 6 draws it; None for other papers.
        accuracy_sustained: the errors at the profiles' sustained rates, without fits; None if they were not predicted.
        wall_seconds: time that the predictions took.
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
        BadInput: the file cannot be written; no part of it is left.
    """
    write_json(path, "report", report)


def agrees(paper: tuple[float, float], ours: tuple[float, float]) -> bool:
    """Test whether two figures or ranges agree, as `AGREEMENT` says.

    Args:
        paper, ours: each the lowest and the highest value, which are equal for a single figure.
    """
    (low, high), (least, most) = paper, ours
    if low < high and least < most:
        return min(high, most) - max(low, least) >= OVERLAP * max(high - low, most - least)
    return least <= high * (1 + NEAR) and most >= low * (1 - NEAR)


def span(low: float, high: float) -> str:
    """Format a range of ratios as text, such as "1.2 to 3x", or "2x" if its ends are equal."""
    first, last = f"{low:.3g}", f"{high:.3g}"
    return f"{first}x" if first == last else f"{first} to {last}x"


def rounded(number: float) -> float:
    """Round to four significant digits."""
    return float(f"{number:.4g}")

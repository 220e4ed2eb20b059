"""A paper's printed figures and the words of its sections and claims, read from a TOML file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Literal, NamedTuple, TypeVar

import msgspec

from moesched.reproduce.report import Accuracy, Claim, Section, Value, agrees, span


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lines of a picture, one through all rows with the same name.

    Attributes:
        y: key of a row's ordinate.
        name: format of a row's values, which gives the row's name.
        style: matplotlib's line style.
    """

    y: str
    name: str
    style: str = "-"


class Picture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A picture of rows.

    Attributes:
        x: key of a row's abscissa, or a format of a row's values, which names its place on the abscissa.
        y: label of the ordinate.
        panels: key by which rows are in different panels; empty for a single one.
        log: axes that are logarithmic: "x" by powers of two with a tick at each value, "symlog" for an x that may be 0.
    """

    kind: Literal["lines", "bars", "map", "parts"] = "lines"
    lines: list[Line] = []
    x: str = ""
    x_label: str = ""
    y: str = ""
    panels: str = ""
    panel_title: str = "{}"
    log: list[str] = []
    panel_inches: float = 7.0


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table on a page, whose cells are formats of a row's values: a line for each row, or one of two other forms.

    Attributes:
        columns: formats of the cells, by the columns' titles.
        down: keys of which each combination of values has a line; its cells have the format `cell`, in a column for
            each different `title`.
        turned: format of a column's title, for a table that has a column for each row; empty for other tables.
    """

    columns: dict[str, str] = {}
    down: list[str] = []
    title: str = ""
    cell: str = ""
    turned: str = ""


class SectionWords(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Words of a section, and how its rows are shown; `{name}` in words is a value that the section gives.

    Attributes:
        how: a description of the work behind the section.
        table: the table on its page; None for one with a column for each key of the rows.
        picture: the picture of its rows; None for none.
    """

    title: str
    how: str
    table: Table | None = None
    picture: Picture | None = None


class PaperClaim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A statement of the text: a ratio from `low` to `high`, or `paper` in words.

    Attributes:
        because: reason that agreement means little; empty otherwise.
    """

    where: str
    what: str
    low: float = 0.0
    high: float = 0.0
    paper: str = ""
    because: str = ""

    def beside(self, ours: str, agrees: bool, **values: object) -> Claim:
        """Return the claim with our result in words; `values` are filled into the statement."""
        return Claim(
            where=self.where,
            what=self.what.format(**values),
            paper=self.paper,
            ours=ours,
            agrees=agrees,
            because=self.because,
        )

    def ratio(self, ours: Sequence[float], how: str = "") -> Claim:
        """Return the claim with the range of our ratios; `how` is added to the statement in parentheses."""
        low, high = min(ours), max(ours)
        return Claim(
            where=self.where,
            what=f"{self.what} ({how})" if how else self.what,
            paper=span(self.low, self.high),
            ours=span(low, high),
            agrees=agrees((self.low, self.high), (low, high)),
            because=self.because,
        )


class PrintedPaper(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parts common to all papers; each adds its figures."""

    title: str
    sections: dict[str, SectionWords]
    claims: dict[str, PaperClaim] = {}

    def section(
        self,
        name: str,
        rows: Iterable[Mapping[str, Value]],
        claims: Iterable[Claim] = (),
        notes: Iterable[str] = (),
        **values: object,
    ) -> Section:
        """Make a section of rows, with its printed words, into which `values` are filled."""
        words = self.sections[name]
        return Section(
            name=name,
            title=words.title.format(**values),
            how=words.how.format(**values),
            rows=[dict(row) for row in rows],
            claims=list(claims),
            notes=list(notes),
        )


class Made(NamedTuple):
    """The results of a paper's reproduction, each computed when it is called.

    Attributes:
        calibration: the rates that the paper does not give, a row each.
        accuracies: the accuracy of the tables' cells, by kind; to be called after the sections.
    """

    sections: dict[str, Callable[[], Section]]
    calibration: Callable[[], list[dict[str, Value]]]
    accuracies: Callable[[], dict[str, Accuracy]] = dict


Paper = TypeVar("Paper", bound=PrintedPaper)


def read_paper(kind: type[Paper], package: str) -> Paper:
    """Read the printed figures of a paper, from paper.toml in its package."""
    return msgspec.toml.decode((resources.files(package) / "paper.toml").read_bytes(), type=kind)

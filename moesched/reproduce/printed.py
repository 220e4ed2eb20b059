"""A paper's printed figures, and the titles and texts of its sections and claims, as read from a TOML file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Literal, NamedTuple, TypeVar

import msgspec

from moesched.reproduce.report import Accuracy, Claim, Section, Value, agrees, span


class Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lines of a picture: `name` makes a name from each row of a section, and rows with equal names form one line.

    Attributes:
        y: key of a row's value on the y axis.
        name: format string that makes a line's name from a row's values, such as "{system}".
        style: matplotlib's line style.
    """

    y: str
    name: str
    style: str = "-"


class Picture(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The picture of a section's rows.

    Attributes:
        kind: "lines" to draw `lines` over `x`; "bars", "map" and "parts" draw particular sections, and use none of the
            other fields.
        x: key of a row's value on the x axis; or a format string, whose result labels the row's place on the x axis.
        y: label of the y axis.
        panels: key by whose values the rows are divided into panels; empty for a single panel.
        panel_title: format string for a panel's title.
        log: axes that are logarithmic: "y"; "x" by powers of two with a tick at each value; "symlog" for an x that may
            be 0.
        panel_inches: width of a panel in inches.
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
    """The layout of a section's results as a table on a page. Format strings are filled with a result's values.

    There are three layouts. By default, each result is a line of the table. With `down`, each result is one cell, and
    results with equal values of some keys are in the same line. With `turned`, each result is a column.

    Attributes:
        columns: by column title, the format string of the column's cells; for the default layout.
        down: the keys whose values decide which results share a line; empty for the other layouts.
        title: with `down`, the format string that makes the title of the column that a result's cell is in.
        cell: with `down`, the format string of a result's cell.
        turned: the format string that gives the title of a result's column; empty for the other layouts.
    """

    columns: dict[str, str] = {}
    down: list[str] = []
    title: str = ""
    cell: str = ""
    turned: str = ""


class SectionWords(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Title and description of a section, and the form of its table and picture.

    A `{name}` in the texts is replaced by a value that is computed with the section.

    Attributes:
        how: a description of how the section's rows were computed.
        table: form of the table; None for a table with a column for each key of the rows.
        picture: form of the picture; None for no picture.
    """

    title: str
    how: str
    table: Table | None = None
    picture: Picture | None = None


class PaperClaim(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A statement in a paper's text: a ratio from `low` to `high`, or else words.

    Attributes:
        where: section of the paper.
        what: the statement's subject.
        low, high: the range of the ratio that the paper states; 0 if it states words.
        paper: the paper's statement in words; empty if it is a ratio.
        because: the reason why agreement with our result would mean little; empty if there is none.
    """

    where: str
    what: str
    low: float = 0.0
    high: float = 0.0
    paper: str = ""
    because: str = ""

    def beside(self, ours: str, agrees: bool, **values: object) -> Claim:
        """Return the claim with our result beside it.

        Args:
            ours: our result in words.
            agrees: whether our result agrees with the paper's.
            values: values by name for the format string `what`.
        """
        return Claim(
            where=self.where,
            what=self.what.format(**values),
            paper=self.paper,
            ours=ours,
            agrees=agrees,
            because=self.because,
        )

    def ratio(self, ours: Sequence[float], how: str = "") -> Claim:
        """Return the claim with the range of our ratios beside it.

        Args:
            ours: our ratios, from which the smallest and the largest are taken.
            how: text to add, in parentheses, to the statement's subject; empty for none.
        """
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
    """The printed title, sections and claims of a paper; a subclass for each paper adds its figures.

    Attributes:
        sections: texts of the sections, by name.
        claims: statements of the paper's text, by our name for each.
    """

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
        """Make a section of the report from computed rows and the section's texts.

        Args:
            name: key in `sections`.
            rows: rows of the table.
            values: values by name for the format strings in the section's texts.
        """
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
    """Functions that compute the results of a paper's reproduction.

    Attributes:
        sections: makes each section, by name.
        calibration: returns the rates that the paper does not give, a row each.
        accuracies: returns the accuracy of the tables' cells, by the kind of prediction; to be called after the
            sections.
    """

    sections: dict[str, Callable[[], Section]]
    calibration: Callable[[], list[dict[str, Value]]]
    accuracies: Callable[[], dict[str, Accuracy]] = dict


Paper = TypeVar("Paper", bound=PrintedPaper)


def read_paper(kind: type[Paper], package: str) -> Paper:
    """Read a paper's printed figures from the file paper.toml of a package.

    Args:
        kind: class of the result.
        package: name of the package.
    """
    return msgspec.toml.decode((resources.files(package) / "paper.toml").read_bytes(), type=kind)

"""Tables of docs/reproduce-EXPERIMENT.md from its result file: what the page of every experiment has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _pages import DOCS, filled, markdown
from _results import RESULTS

Row = dict[str, Any]


class ReproducePage(NamedTuple):
    """The page of an experiment.

    Attributes:
        section_table: the rows of a section of the result, as a table.
        other_tables: those of the result as a whole, by name.
    """

    experiment: str
    section_table: Callable[[Row], str]
    other_tables: Callable[[Row], dict[str, str]]

    @property
    def file(self) -> Path:
        """Where it is."""
        return DOCS / f"reproduce-{self.experiment}.md"

    def result(self) -> Row:
        """What the experiment found."""
        found: Row = json.loads((RESULTS / f"reproduce-{self.experiment}.json").read_text())
        return found

    def text(self) -> str:
        """Its words as they are, its tables as the result has them."""
        result = self.result()
        tables = self.other_tables(result)
        for section in result["sections"]:
            tables[section["name"]] = "\n".join([self.section_table(section), *_claims_and_notes(section)])
        return filled(self.file.read_text(), tables.get)

    def write(self) -> None:
        """Write its tables anew."""
        self.file.write_text(self.text())
        print(self.file)


def calibration(result: Row) -> dict[str, str]:
    """What was fitted to what, row by row."""
    return {"calibration": plain(result["calibration"])}


def plain(rows: Sequence[Row]) -> str:
    """Row by row."""
    return markdown(
        [each.replace("_", " ") for each in rows[0]], [list(map(_said, row.values())) for row in rows]
    )


def across(rows: Sequence[Row], down: Sequence[str], columns: Sequence[str], figure: str) -> str:
    """A line for each value of some keys, a column for each value of others."""
    names = list(dict.fromkeys(tuple(row[key] for key in columns) for row in rows))
    lines: dict[tuple[Any, ...], dict[tuple[Any, ...], Any]] = {}
    for row in rows:
        at = tuple(row[key] for key in columns)
        lines.setdefault(tuple(row[key] for key in down), {})[at] = row[figure]
    return markdown(
        [*down, *(", ".join(map(str, name)) for name in names)],
        [[*key, *(line[name] for name in names)] for key, line in lines.items()],
    )


def _claims_and_notes(section: Row) -> Iterator[str]:
    """What the paper states beside ours, and what is to be known of a section."""
    if section["claims"]:
        columns = ["where", "claim", "paper", "ours", "agrees (ratios: within 20 %)"]
        keys = ("where", "what", "paper", "ours", "agrees")
        yield ""
        yield markdown(columns, [[_said(each[key]) for key in keys] for each in section["claims"]])
    for note in section["notes"]:
        yield f"\n{note}"


def _said(value: Any) -> Any:
    """Truth in words."""
    return ("**no**", "yes")[value] if isinstance(value, bool) else value

"""Fills the tables of docs/reproduce-twiddler.md from the result file, so that no figure in them is typed by hand.

    moesched reproduce twiddler --report benchmarks/results/reproduce-twiddler.json --out docs/pictures
    python benchmarks/_twiddler_page.py

The page's words are its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from _pages import markdown
from _reproduce_pages import ReproducePage, Row, across, calibration, plain

ACROSS = {
    "generation": (("environment", "policy"), ("input", "output"), "tokens_per_second"),
    "prefill": (("environment", "policy"), ("input",), "seconds"),
    "beams": (("environment", "policy"), ("width",), "tokens_per_second"),
}
"""Of sections with a row for each configuration: the keys down, those across, and the figure."""


def table(section: Row) -> str:
    """A section's rows."""
    if section["name"] in ACROSS:
        return across(section["rows"], *ACROSS[section["name"]])
    if section["name"] == "variants":
        return turned(section["rows"])
    return plain(section["rows"])


def turned(rows: Sequence[Row]) -> str:
    """A column for each row."""

    def lines() -> Iterator[list[Any]]:
        for key in list(rows[0])[2:]:
            yield [key.replace("_", " "), *(row[key] for row in rows)]

    return markdown(["", *(f"{row['assumed']}; environment {row['environment']}" for row in rows)], lines())


PAGE = ReproducePage("twiddler", table, calibration)

if __name__ == "__main__":
    PAGE.write()

"""Fills the tables of docs/reproduce-twiddler.md from the result file, so that no figure in them is typed by hand.

    moesched reproduce twiddler --report benchmarks/results/reproduce-twiddler.json --out docs/pictures
    python benchmarks/_twiddler_page.py

The page's words are its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from _pages import DOCS, fill, markdown
from _reproduce_page import claims_and_notes
from _results import RESULTS

RESULT = RESULTS / "reproduce-twiddler.json"
PAGE = DOCS / "reproduce-twiddler.md"

ACROSS = {
    "generation": (("environment", "policy"), ("input", "output"), "tokens_per_second"),
    "prefill": (("environment", "policy"), ("input",), "seconds"),
    "beams": (("environment", "policy"), ("width",), "tokens_per_second"),
}
"""Of sections with a row for each configuration: the keys down, those across, and the figure."""

Row = dict[str, Any]


def main() -> None:
    """Write the page anew."""
    fill(PAGE, tables(json.loads(RESULT.read_text())).get)


def tables(result: Row) -> dict[str, str]:
    """The tables of a result, by name."""
    found = {"calibration": plain(result["calibration"])}
    for section in result["sections"]:
        found[section["name"]] = "\n".join([table(section), *claims_and_notes(section)])
    return found


def table(section: Row) -> str:
    """A section's rows."""
    if section["name"] in ACROSS:
        return across(section["rows"], *ACROSS[section["name"]])
    if section["name"] == "variants":
        return turned(section["rows"])
    return plain(section["rows"])


def plain(rows: Sequence[Row]) -> str:
    """Row by row."""
    return markdown(
        [each.replace("_", " ") for each in rows[0]], [list(map(said, row.values())) for row in rows]
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


def turned(rows: Sequence[Row]) -> str:
    """A column for each row."""

    def lines() -> Iterator[list[Any]]:
        for key in list(rows[0])[2:]:
            yield [key.replace("_", " "), *(row[key] for row in rows)]

    return markdown(["", *(f"{row['assumed']}; environment {row['environment']}" for row in rows)], lines())


def said(value: Any) -> Any:
    """Truth in words."""
    return ("**no**", "yes")[value] if isinstance(value, bool) else value


if __name__ == "__main__":
    main()

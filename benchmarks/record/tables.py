"""Tables of the documentation, in Markdown, written between `<!-- table NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
PLACE = re.compile(r"(<!-- table ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def filled(page: str, table: Callable[[str], str | None]) -> str:
    """A page with its tables written anew; those that `table` does not know, and the text, stay."""

    def place(match: re.Match[str]) -> str:
        begin, name, before, end = match.groups()
        written = table(name)
        return begin + (before if written is None else f"\n{written.strip()}\n\n") + end

    return PLACE.sub(place, page)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table of these columns."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(map(shown, line))} |" for line in lines)


def shown(value: Any) -> str:
    """A cell: numbers in short, truth as yes or no, nothing for None."""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return f"{value:g}" if isinstance(value, float) else "" if value is None else str(value)


def plain(rows: Sequence[Row]) -> str:
    """A line for each row, a column for each key; an error is a percentage."""
    names = [each.replace("_", " ") for each in rows[0]]
    return markdown(names, [[percent(v) if k == "error" else v for k, v in row.items()] for row in rows])


def table_of(rows: Iterable[Row], columns: Mapping[str, str]) -> str:
    """A line for each row; columns by their titles, as formats of a row."""
    return markdown([*columns], [[cell.format_map(row) for cell in columns.values()] for row in rows])


def across(rows: Sequence[Row], down: Sequence[str], title: str, cell: str) -> str:
    """A line for each value of the keys `down`, a column for each title; titles and cells are formats of a row."""
    titles = list(dict.fromkeys(title.format_map(row) for row in rows))
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault(tuple(row[key] for key in down), {})
        line[title.format_map(row)] = cell.format_map(row)
    return markdown(
        [*(key.replace("_", " ") for key in down), *titles],
        [[*key, *(line.get(each, "") for each in titles)] for key, line in lines.items()],
    )


def percent(error: float | None) -> str:
    """A relative error."""
    return "" if error is None else f"{error:+.1%}"

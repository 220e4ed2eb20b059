"""Tables that are written into a page of the docs: between `<!-- table NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent.parent / "docs"
PLACE = re.compile(r"(<!-- table ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


Table = Callable[[str], str | None]
"""The table of a name; None where there is none."""


def fill(page: Path, table: Table) -> None:
    """Write every table of a page anew."""
    page.write_text(filled(page.read_text(), table))
    print(page)


def filled(text: str, table: Table) -> str:
    """A page's text with its tables; those that there are not, and the text around them, are left as they are."""

    def place(match: re.Match[str]) -> str:
        begin, name, before, end = match.groups()
        written = table(name)
        return begin + (before if written is None else f"\n{written.strip()}\n\n") + end

    return PLACE.sub(place, text)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        f"| {' | '.join(f'{each:g}' if isinstance(each, float) else str(each) for each in line)} |"
        for line in lines
    )

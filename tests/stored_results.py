"""Sections of the stored results of a reproduced paper."""

from __future__ import annotations

from typing import Any

import msgspec

from benchmarks.record.results import RESULTS, stored
from moesched.reproduce import Section


class StoredResults:
    """The results of `moesched reproduce` for a paper.

    Attributes:
        found: all of it.
    """

    def __init__(self, paper: str) -> None:
        self.found = stored(RESULTS / f"reproduce-{paper}.json")

    def section(self, name: str) -> Section:
        (section,) = (each for each in self.found["sections"] if each["name"] == name)
        return msgspec.convert(section, Section)

    def rows(self, section: str, **where: object) -> list[dict[str, Any]]:
        """The rows that have these values."""
        return [dict(row) for row in self.section(section).rows if where.items() <= row.items()]

    def cells(self, section: str, key: str, **where: object) -> list[Any]:
        """One column of those rows."""
        return [row[key] for row in self.rows(section, **where)]

    def cell(self, section: str, key: str, **where: object) -> float:
        """The figure of the one such row."""
        (found,) = self.cells(section, key, **where)
        return float(found)

"""The tables of the page about the expert kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from _tables import across

Result = dict[str, Any]


def shares(result: Result) -> str:
    """The share of the limit that each instruction set reaches on one core, with the rate."""
    return across(
        list(_rows(result)), ["instructions", "expert"], "{n}", "{share_of_limit:.0%} ({kernel_gbs:.1f})"
    )


def limits(result: Result) -> str:
    """The limits of each instruction set on one core; the smaller one counts."""
    return across(
        list(_rows(result)),
        ["instructions", "expert"],
        "{n}",
        "{read_limit_gbs:.1f}, {compute_limit_gbs:.1f}",
    )


def times_torch(result: Result) -> str:
    """The best instruction set on one core over torch on one core."""
    rows = [row for row in _rows(result) if "times_torch" in row]
    return across(rows, ["expert"], "{n}", "{times_torch:.2f}x")


def _rows(result: Result) -> Iterator[Result]:
    for instructions, experts in result.get("one_core", {}).items():
        for expert, by_rows in experts.items():
            for rows, figures in by_rows.items():
                n = f"{rows} row{'s' if rows != '1' else ''}"
                yield {**figures, "instructions": f"`{instructions}`", "expert": f"`{expert}`", "n": n}

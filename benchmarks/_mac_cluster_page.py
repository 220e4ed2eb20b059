"""Fills the tables of docs/reproduce-mac-cluster.md from the result file, so that no figure in them is typed by hand.

    moesched reproduce mac-cluster --report benchmarks/results/reproduce-mac-cluster.json --out docs/pictures
    python benchmarks/_mac_cluster_page.py

The page's words are its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from _pages import markdown
from _reproduce_pages import ReproducePage, Row, across, calibration, plain


def table(section: Row) -> str:
    """A section's rows."""
    rows = section["rows"]
    if section["name"] in ("table-3", "table-4"):
        return breakdown(rows)
    if section["name"] == "table-6":
        return across([{**row, "shown": shown(row)} for row in rows], ("nodes",), ("cell",), "shown")
    if section["name"] == "figure-8":
        return by_nodes(rows)
    if "error" in rows[0]:
        rows = [{**row, "error": percent(row["error"])} for row in rows]
    return plain(rows)


def breakdown(rows: Sequence[Row]) -> str:
    """A line for each method and who says it: the paper, then ours with the error, fitted cells in italics."""
    parts = list(dict.fromkeys(row["part"] for row in rows))
    lines: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        lines.setdefault((row["method"], row["nodes"]), []).append(row)
    written = []
    for (method, nodes), cells in lines.items():
        written.append([method, nodes, "paper", *(f"{cell['paper']:g}" for cell in cells)])
        written.append([method, nodes, "ours", *map(ours, cells)])
    return markdown(["method", "nodes", "", *parts], written)


def by_nodes(rows: Sequence[Row]) -> str:
    """A line for each network, a column for each number of nodes; some were not realised."""
    nodes = list(dict.fromkeys(row["nodes"] for row in rows))
    lines: dict[str, Row] = {}
    for row in rows:
        lines.setdefault(row["network"], {})[row["nodes"]] = row["bound"]
    return markdown(
        ["network", *(f"{count} nodes" for count in nodes)],
        [[name, *(line.get(count, "") for count in nodes)] for name, line in lines.items()],
    )


def ours(cell: Row) -> str:
    """Our figure and how far it is off."""
    text = f"{cell['ours']:.3g} ({percent(cell['error'])})"
    return f"*{text}*" if cell["fitted"] else text


def shown(row: Row) -> str:
    """A printed cell; ours beside it where it is another."""
    return row["ours"] if row["agrees"] else f"{row['ours']} (**paper: {row['paper']}**)"


def percent(error: float | None) -> str:
    """A relative error."""
    return "" if error is None else f"{error:+.1%}"


PAGE = ReproducePage("mac-cluster", table, calibration)

if __name__ == "__main__":
    PAGE.write()

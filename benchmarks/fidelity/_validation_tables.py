"""The tables of docs/validation.md: the bars, the sources, and every row, misses first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.fidelity._validation_summary import FIGURES
from benchmarks.record.tables import markdown, percent

Result = dict[str, Any]
BAR = ("words", "figure", "bar", "reached")


def bars_table(result: Result) -> str:
    """Missed bars first."""
    rows = sorted(([bar[key] for key in BAR] for bar in result["bars"]), key=lambda row: bool(row[-1]))
    return markdown(["measure", "value", "bar", "reached"], rows)


def sources_table(result: Result) -> str:
    """The median error of each source, and of its rows inside the band."""
    rows = []
    for name in FIGURES:
        of = result["summary"].get(name, {"sources": {}})
        for source, error in sorted(of["sources"].items(), key=lambda each: -float(each[1])):
            mine = [row[name] for row in result["rows"] if predicted(row, name) and row["source"] == source]
            inside = sum(each["inside"] for each in mine)
            rows.append([source, name, f"{error:.0%}", f"{inside} of {len(mine)}"])
    return markdown(["source", "of", "median error", "inside the band"], rows)


def rows_table(result: Result, *uses: str) -> str:
    """Every row of some uses: those outside their band first, the largest error before the others."""
    cells = [(row, name) for row in result["rows"] if row["use"] in uses for name in FIGURES if name in row]
    cells.sort(key=lambda cell: (cell[0][cell[1]]["inside"], -abs(cell[0][cell[1]]["error"])))
    columns = [
        "model",
        "machine",
        "setting",
        "policy",
        "of",
        "measured",
        "predicted",
        "band",
        "error",
        "inside",
    ]
    return markdown(columns, [*(line(row, name) for row, name in cells), *failures(result, uses)])


def line(row: Result, name: str) -> list[Any]:
    """The cells of a row's figure, in tokens per second."""
    of = row[name]
    return [
        *(cell(row[key]) for key in ("model", "machine", "setting")),
        f"`{row['policy']}`",
        name,
        f"{of['measured']:.3g}",
        f"{of['predicted']:.3g}",
        f"{of['low']:.3g} to {of['high']:.3g}",
        percent(of["error"]),
        f"{'yes' if of['inside'] else 'no'}, not counted" if row["use"] == "shown" else of["inside"],
    ]


def failures(result: Result, uses: Sequence[str]) -> Iterator[list[Any]]:
    """Rows of some uses that the simulator refuses."""
    for row in result["rows"]:
        if row["use"] in uses and "fails" in row:
            where = [cell(row[key]) for key in ("model", "machine", "setting")]
            yield [*where, f"`{row['policy']}`", cell(row["fails"]), *[""] * 5]


def mappings_table(result: Result) -> str:
    """The terms of each source's rows."""
    whys = {(row["source"], row["why"]): None for row in result["rows"] if row["use"] != "skip"}
    return markdown(["source", "how"], [[source, cell(why)] for source, why in whys])


def skipped_table(result: Result) -> str:
    """Rows that are not expressed."""
    rows = [row for row in result["rows"] if row["use"] == "skip"]
    return markdown(
        ["model", "machine", "setting", "why"],
        [[cell(row[key]) for key in ("model", "machine", "setting", "why")] for row in rows],
    )


def predicted(row: Result, name: str) -> bool:
    """Test whether a row counts for a figure."""
    return row["use"] == "predict" and name in row


def cell(text: str) -> str:
    """A text that does not end its cell."""
    return text.replace("|", "/")


def tables(result: Result) -> dict[str, str]:
    """The tables of docs/validation.md."""
    return {
        "validation-bars": bars_table(result),
        "validation-sources": sources_table(result),
        "validation-rows": rows_table(result, "predict", "shown"),
        "validation-fitted": rows_table(result, "fit"),
        "validation-mappings": mappings_table(result),
        "validation-skipped": skipped_table(result),
    }

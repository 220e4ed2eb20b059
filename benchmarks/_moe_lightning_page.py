"""Fills the tables of docs/reproduce-moe-lightning.md from the result file, so that no figure in them is typed by hand.

    moesched reproduce moe-lightning --report benchmarks/results/reproduce-moe-lightning.json
    python benchmarks/_moe_lightning_page.py

The page's words are its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from _pages import markdown
from _reproduce_pages import ReproducePage, Row, plain


def table(section: Row) -> str:
    """A section's rows."""
    rows = section["rows"]
    if section["name"].startswith("table"):
        return cells(rows)
    if "new_tokens" in rows[0]:
        return by_generation(rows)
    return policies(rows) if section["name"] == "policy-map" else plain(rows)


def rates_and_accuracy(result: Row) -> dict[str, str]:
    """The tables of the result as a whole."""
    return {"calibration": rates(result), "accuracy": accuracy(result)}


def rates(result: Row) -> str:
    """What was fitted to which cell."""
    rows = [
        [row["of"], f"{row['share']:.1%}", f"{row['gb_per_second']:g} GB/s", row["set_by"]]
        for row in result["calibration"]
    ]
    return markdown(["rate", "share of the profile's", "comes to", "set by"], rows)


def accuracy(result: Row) -> str:
    """How far the predicted cells are off."""
    rows = []
    for name, each in (
        ("FlexGen as its code runs", result["accuracy"]),
        ("FlexGen as Fig. 6 draws it", result["accuracy_as_drawn"]),
    ):
        order = f"{each['pairs'] - len(each['wrong'])} of {each['pairs']}"
        rows.append(
            [name, each["cells"], f"{each['median_error']:.1%}", order, "; ".join(each["wrong"]) or "-"]
        )
    columns = [
        "",
        "predicted cells",
        "median absolute error",
        "pairs over 20 % apart in order",
        "not in order",
    ]
    return markdown(columns, rows)


def cells(rows: Sequence[Row]) -> str:
    """A table of the paper, cell by cell."""
    columns = ["workload", "setting", "system", "µ", "N/µ", "paper", "ours", "error", "", "bound by"]
    return markdown(
        columns,
        [
            [
                row["workload"],
                row["setting"],
                row["system"],
                row["micro_batch_size"],
                row["micro_batches"],
                row["paper"],
                row["ours"],
                f"{row['error']:+.1%}",
                "fitted" if row["fitted"] else "predicted",
                f"{row['bound_by']} {row['busy']:.0%}",
            ]
            for row in rows
        ],
    )


def by_generation(rows: Sequence[Row]) -> str:
    """Tokens per second, a column for each generation length."""
    lengths = list(dict.fromkeys(row["new_tokens"] for row in rows))
    lines: dict[tuple[str, ...], dict[int, Row]] = {}
    for row in rows:
        lines.setdefault((row["setting"], row["system"], row["sizes_by"]), {})[row["new_tokens"]] = row
    return markdown(
        ["setting", "system", "sizes by", *(f"{length} tokens" for length in lengths)],
        [
            [*name, *(f"{line[n]['tokens_per_second']:g} (µ {line[n]['micro_batch_size']})" for n in lengths)]
            for name, line in lines.items()
        ],
    )


def policies(rows: Sequence[Row]) -> str:
    """The share of the weights that is offloaded and where attention runs, by CPU and link."""
    links = list(dict.fromkeys(row["link_gb_per_second"] for row in rows))
    lines: dict[int, list[str]] = {}
    for row in rows:
        lines.setdefault(row["cpu_ratio"], []).append(f"{row['weights_on_cpu']:.0%}, {row['attention_on']}")
    return markdown(
        ["times the base CPU", *(f"{link} GB/s" for link in links)],
        [[ratio, *line] for ratio, line in lines.items()],
    )


PAGE = ReproducePage("moe-lightning", table, rates_and_accuracy)

if __name__ == "__main__":
    PAGE.write()

"""The tables of the pages of reproduced papers: a section's rows, the paper's statements beside ours, and notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.record.claims import Result
from benchmarks.record.tables import Row, across, markdown, percent, plain, shown, table_of
from moesched.reproduce.report import AGREEMENT

CELLS = {
    "workload": "{workload}",
    "setting": "{setting}",
    "system": "{system}",
    "µ": "{micro_batch_size}",
    "N/µ": "{micro_batches}",
    "paper": "{paper}",
    "ours": "{ours}",
    "error": "{error:+.1%}",
    "": "{how}",
    "bound by": "{bound_by} {busy:.0%}",
}


RATES = {
    "rate": "{of}",
    "share of the profile's": "{share:.1%}",
    "comes to": "{gb_per_second:g} GB/s",
    "set by": "{set_by}",
}


def cells(rows: Sequence[Row]) -> str:
    """A table of the paper, cell by cell."""
    return table_of([{**row, "how": "fitted" if row["fitted"] else "predicted"} for row in rows], CELLS)


def breakdown(rows: Sequence[Row]) -> str:
    """A line for each method and who says it: the paper, then ours with the error, fitted cells in italics."""
    doubled = [
        {**row, "by": by, "cell": cell}
        for row in rows
        for by, cell in (("paper", f"{row['paper']:g}"), ("ours", ours(row)))
    ]
    return across(doubled, ["method", "nodes", "by"], "{part}", "{cell}")


def ours(row: Row) -> str:
    """Our figure and its error."""
    text = f"{row['ours']:.3g} ({percent(row['error'])})"
    return f"*{text}*" if row["fitted"] else text


def printed(rows: Sequence[Row]) -> str:
    """A line for each number of nodes; ours, with the paper's cell where that is another."""
    said = [
        {**row, "shown": row["ours"] if row["agrees"] else f"{row['ours']} (**paper: {row['paper']}**)"}
        for row in rows
    ]
    return across(said, ["nodes"], "{cell}", "{shown}")


def sustained(rows: Sequence[Row]) -> str:
    """Cells at sustained rates, with their bands."""
    columns = {
        "workload": "{workload}",
        "setting": "{setting}",
        "system": "{system}",
        "paper": "{paper:g}",
        "ours": "{ours:g} ({low:g} to {high:g})",
        "error": "{error:+.1%}",
        "at the data sheets": "{at_peak:g}",
        "bound by": "{bound_by}",
    }
    return table_of(rows, columns)


def artifact(rows: Sequence[Row]) -> str:
    """The authors' own runs, with the parts of their time."""
    columns = {
        "system": "{system}",
        "workload": "{workload}",
        "new tokens": "{new_tokens}",
        "N": "{requests}",
        "µ": "{micro_batch_size}",
        "the artifact": "{measured:g}",
        "ours": "{ours:g}",
        "error": "{error:+.1%}",
        "prefill, s": "{prefill_seconds:g}",
        "decode step, s": "{step_seconds:g}",
        "": "{sets}",
    }
    return table_of(
        [{**row, "sets": "sets a rate" if row["sets_a_rate"] else "predicted"} for row in rows], columns
    )


def turned(rows: Sequence[Row]) -> str:
    """A column for each row."""
    keys = list(rows[0])[2:]
    columns = ["", *(f"{row['assumed']}; environment {row['environment']}" for row in rows)]
    return markdown(columns, [[key.replace("_", " "), *(row[key] for row in rows)] for key in keys])


BY_LENGTH = partial(
    across,
    down=["setting", "system", "sizes_by"],
    title="{new_tokens} tokens",
    cell="{tokens_per_second:g} (µ {micro_batch_size})",
)


SECTIONS: dict[str, dict[str, Callable[[Sequence[Row]], str]]] = {
    "moe-lightning": {
        "table-4": cells,
        "table-5": cells,
        "speedups": BY_LENGTH,
        "scaling": BY_LENGTH,
        "sustained": sustained,
        "artifact": artifact,
        "policy-map": partial(
            across,
            down=["cpu_ratio"],
            title="{link_gb_per_second} GB/s",
            cell="{weights_on_cpu:.0%}, {attention_on}",
        ),
    },
    "twiddler": {
        "generation": partial(
            across, down=["environment", "policy"], title="{input}, {output}", cell="{tokens_per_second:g}"
        ),
        "prefill": partial(across, down=["environment", "policy"], title="{input}", cell="{seconds:g}"),
        "beams": partial(
            across, down=["environment", "policy"], title="{width}", cell="{tokens_per_second:g}"
        ),
        "variants": turned,
    },
    "mac-cluster": {
        "table-3": breakdown,
        "table-4": breakdown,
        "table-6": printed,
        "figure-8": partial(across, down=["network"], title="{nodes} nodes", cell="{bound:g}"),
    },
}


def tables(result: Result) -> dict[str, str]:
    """The tables of the page of a paper."""
    written = {
        "calibration": table_of(result["calibration"], RATES)
        if "gb_per_second" in result["calibration"][0]
        else plain(result["calibration"])
    }
    written["agreement"] = AGREEMENT
    if result["accuracy"]:
        written["accuracy"] = accuracy(result)
    for section in result["sections"]:
        table = SECTIONS[result["paper"]].get(section["name"], plain)
        written[section["name"]] = "\n\n".join([table(section["rows"]), *claims(section), *section["notes"]])
    return written


def claims(section: Result) -> list[str]:
    """Statements of the paper beside ours."""
    rows = [
        {**claim, "said": ", ".join(filter(None, [shown(claim["agrees"]), claim["because"]]))}
        for claim in section["claims"]
    ]
    columns = {
        "where": "{where}",
        "claim": "{what}",
        "paper": "{paper}",
        "ours": "{ours}",
        "agrees": "{said}",
    }
    return [table_of(rows, columns)] if rows else []


def accuracy(result: Result) -> str:
    """Errors of the predicted cells."""
    rows = [
        [
            name,
            each["cells"],
            f"{each['median_error']:.1%}",
            f"{each['pairs'] - len(each['wrong'])} of {each['pairs']}",
            "; ".join(each["wrong"]) or "-",
        ]
        for name, each in (
            ("FlexGen as its code runs", result["accuracy"]),
            ("FlexGen as Fig. 6 draws it", result["accuracy_as_drawn"]),
            ("sustained rates, no cell fitted", result["accuracy_sustained"]),
        )
    ]
    return markdown(
        ["", "predicted cells", "median absolute error", "pairs over 20 % apart in order", "not in order"],
        rows,
    )

"""The tables of the pages of reproduced papers: a section's rows, the paper's statements beside ours, and notes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.record.claims import Result
from benchmarks.record.tables import Row, across, markdown, percent, plain, shown, table_of
from moesched.reproduce import PRINTED
from moesched.reproduce.printed import Table
from moesched.reproduce.report import AGREEMENT

RATES = {
    "rate": "{of}",
    "share of the profile's": "{share:.1%}",
    "comes to": "{gb_per_second:g} GB/s",
    "set by": "{set_by}",
}
CLAIMS = {"where": "{where}", "claim": "{what}", "paper": "{paper}", "ours": "{ours}", "agrees": "{said}"}


def tables(result: Result) -> dict[str, str]:
    """The tables of the page of a paper."""
    rates = result["calibration"]
    written = {
        "calibration": table_of(rates, RATES) if "gb_per_second" in rates[0] else plain(rates),
        "agreement": AGREEMENT,
    }
    if result["accuracy"]:
        written["accuracy"] = accuracy(result)
    for section in result["sections"]:
        words = PRINTED[result["paper"]].sections[section["name"]]
        table = plain(section["rows"]) if words.table is None else as_table(section["rows"], words.table)
        written[section["name"]] = "\n\n".join([table, *claims(section), *section["notes"]])
    return written


def as_table(rows: Sequence[Row], table: Table) -> str:
    """The rows as the paper's file has them shown."""
    if table.turned:
        keys = list(rows[0])[2:]
        columns = ["", *(table.turned.format_map(row) for row in rows)]
        return markdown(columns, [[key.replace("_", " "), *(row[key] for row in rows)] for key in keys])
    told = [each for row in rows for each in in_words(row, doubled="by" in table.down)]
    return across(told, table.down, table.title, table.cell) if table.down else table_of(told, table.columns)


def in_words(row: Row, *, doubled: bool) -> Iterator[Row]:
    """A row with some of its values in words; doubled, the paper's and then ours with the error, fitted in italics."""
    told = {
        **row,
        "how": "fitted" if row.get("fitted") else "predicted",
        "sets": "sets a rate" if row.get("sets_a_rate") else "predicted",
        "beside": row.get("ours")
        if row.get("agrees")
        else f"{row.get('ours')} (**paper: {row.get('paper')}**)",
    }
    if not doubled:
        yield told
        return
    ours = f"{row['ours']:.3g} ({percent(row['error'])})"
    yield {**told, "by": "paper", "shown": f"{row['paper']:g}"}
    yield {**told, "by": "ours", "shown": f"*{ours}*" if row["fitted"] else ours}


def claims(section: Result) -> list[str]:
    """Statements of the paper beside ours."""
    rows = [
        {**claim, "said": ", ".join(filter(None, [shown(claim["agrees"]), claim["because"]]))}
        for claim in section["claims"]
    ]
    return [table_of(rows, CLAIMS)] if rows else []


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

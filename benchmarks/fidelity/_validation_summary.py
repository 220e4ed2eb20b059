"""The figures of a validation: each source counts once, by its median error; pairs of settings by their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from math import exp, log
from statistics import fmean, median
from typing import Any

from benchmarks.record.claims import Claim, at_least, at_most

Row = dict[str, Any]

FIGURES = ("decode", "prefill")
ERROR_BARS = {"decode": 0.25, "prefill": 0.5}
INSIDE_BARS = {"decode": 0.8, "prefill": 0.6}
WIDTH_BAR, ORDER_BAR = 2.0, 0.9
FORM = "{:.2f}"
APART = 1.1
"""Measured rates closer than this are not ordered."""


def judged(measured: float, low: float, predicted: float, high: float) -> Row:
    """A prediction beside the measured rate; the error is relative to that."""
    return {
        "measured": measured,
        "predicted": predicted,
        "low": low,
        "high": high,
        "error": predicted / measured - 1,
        "inside": low <= measured <= high,
        "width": high / low,
    }


def counted(rows: Sequence[Row]) -> Row:
    """The summary and the bars of rows marked "predict", and the spread of these and of those marked "fit".

    Empty without a predicted decode rate.
    """
    predicted = [row for row in rows if row["use"] == "predict"]
    if not any("decode" in row for row in predicted):
        return {}
    found = summary(predicted)
    known = [row for row in rows if row["use"] in ("predict", "fit")]
    spreads = {name: spread(known, name) for name in FIGURES if any(name in row for row in known)}
    return {"summary": found, "bars": [claim._asdict() for claim in bars(found)], "spread": spreads}


def summary(rows: Iterable[Row]) -> Row:
    """The figures of rows, which have a `source` and, by name, figures as `judged` gives them."""
    kept = list(rows)
    figures = {name: of_figure(kept, name) for name in FIGURES if any(name in row for row in kept)}
    pairs = [pair for name in figures for pair in ordered_pairs(kept, name)]
    right = sum(pair["right"] for pair in pairs)
    return {
        **figures,
        "pairs": len(pairs),
        "pairs_in_order": right,
        "order": right / len(pairs) if pairs else None,
    }


def of_figure(rows: Sequence[Row], name: str) -> Row:
    """The summary of decode or prefill."""
    found = [row for row in rows if name in row]
    sources = {
        source: median(abs(row[name]["error"]) for row in found if row["source"] == source)
        for source in dict.fromkeys(row["source"] for row in found)
    }
    return {
        "rows": len(found),
        "sources": sources,
        "median_error": median(sources.values()),
        "inside": sum(row[name]["inside"] for row in found),
        "median_width": median(row[name]["width"] for row in found),
        "widest": max(row[name]["width"] for row in found),
    }


def spread(rows: Iterable[Row], name: str) -> float:
    """The root mean square of the rows' errors, as a factor."""
    return exp(fmean(log(1 + row[name]["error"]) ** 2 for row in rows if name in row) ** 0.5)


def ordered_pairs(rows: Sequence[Row], name: str) -> Iterator[Row]:
    """Pairs of settings of one source and model whose measured rates are apart: whether their order is right."""
    for one, other in combinations([row for row in rows if name in row], 2):
        if (one["source"], one["model"]) != (other["source"], other["model"]):
            continue
        slow, fast = sorted((one[name], other[name]), key=lambda each: float(each["measured"]))
        if fast["measured"] > APART * slow["measured"]:
            yield {
                "source": one["source"],
                "settings": (one["setting"], other["setting"]),
                "right": fast["predicted"] > slow["predicted"],
            }


def bars(result: Row) -> Iterator[Claim]:
    """The bars of a summary."""
    for name in FIGURES:
        if name in result:
            of = result[name]
            yield at_most(f"{name}: median error of the sources", of["median_error"], ERROR_BARS[name], FORM)
            share = of["inside"] / of["rows"]
            yield at_least(f"{name}: share of rows inside the band", share, INSIDE_BARS[name], FORM)
    yield at_most("decode: width of the band, widest", result["decode"]["widest"], WIDTH_BAR, FORM)
    if result["order"] is not None:
        yield at_least("pairs of settings in the right order", result["order"], ORDER_BAR, FORM)

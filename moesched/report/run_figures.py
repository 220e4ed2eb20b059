"""Makes the figures and tables of a run's page: rates, times, peaks beside budgets, predictions beside measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moesched.analysis.explanation import Explanation
from moesched.analysis.published import PUBLISHED_PREFILLS
from moesched.report.markup import table
from moesched.trace.recording import Recording
from moesched.units import format_bytes, format_number, format_seconds

SHOWN_KINDS = 12
SHOWN_MICRO_BATCHES = 32

PREFILL = "prefill_seconds"
RATES = {"decode_tokens_per_second": "decode", "throughput_tokens_per_second": "throughput"}
TIMES = {
    "load_seconds": "load",
    "warm_up_seconds": "warm-up",
    PREFILL: "prefill",
    "first_token_seconds": "first token, on average",
    "between_tokens_seconds": "between tokens, average",
}
"""Figures of a report by their keys, in words."""


def run_figures(
    recording: Recording, explanation: Explanation | None, report: Mapping[str, Any]
) -> dict[str, str]:
    """Return the figures for the top of a run's page: each as text, with its unit, by name.

    Args:
        explanation: the run's explanation; None to leave out the figures that come from it.
        report: the run's report as JSON values; empty if there is none.
    """
    found: dict[str, str] = {}
    for key, name in RATES.items():
        if report.get(key):
            found[name] = f"{format_number(report[key])} tokens/s"
    for key, name in TIMES.items():
        if report.get(key):
            found[name] = format_seconds(report[key])
            if key == PREFILL and not (report["measured"] or report["costs_measured"]):
                found |= [PUBLISHED_PREFILLS]
    if explanation is not None:
        found["run, without loading"] = format_seconds(explanation.seconds)
        found["lanes busy at a time"] = f"{explanation.overlap:.2f}"
    found["tasks"] = f"{len(recording.slices):,}"
    moved = sum(each.task.nbytes for each in recording.slices if each.task.type == "PageTransfer")
    if moved:
        found["moved"] = format_bytes(moved)
    return found


def micro_batches_table(report: Mapping[str, Any]) -> str:
    """Return the HTML table of the times of the first micro-batches; empty if the report has none."""
    times: Sequence[Mapping[str, Any]] = report.get("micro_batch_times", ())
    figures = ("first_token_seconds", "between_tokens_seconds", "longest_between_tokens_seconds")
    rows = [
        [f"{number}", f"{len(each['requests']):,}"]
        + ["" if each[figure] is None else format_seconds(each[figure]) for figure in figures]
        for number, each in enumerate(times[:SHOWN_MICRO_BATCHES])
    ]
    more = "" if len(times) <= SHOWN_MICRO_BATCHES else f", the first {SHOWN_MICRO_BATCHES} of {len(times):,}"
    columns = ["micro-batch", "requests", "first token", "between tokens", "at most"]
    return table(f"Micro-batches{more}", columns, rows, 4) if rows else ""


def budgets_table(report: Mapping[str, Any]) -> str:
    """Return the HTML table of each memory's peak beside its budget; empty if the report has no peaks."""
    peaks: Mapping[str, int] = report.get("peak_bytes", {})
    budgets: Mapping[str, int] = report.get("budget_bytes", {})
    rows = [
        [name, format_bytes(peak), format_bytes(budgets[name]) if name in budgets else ""]
        for name, peak in peaks.items()
        if peak
    ]
    return table("Memory", ["memory", "peak", "budget"], rows, 2) if rows else ""


def expectation_table(report: Mapping[str, Any]) -> str:
    """Return the HTML table of rates, times and lanes' busy times beside expected ones; empty if none are expected."""
    expected: Mapping[str, Any] | None = report.get("expected")
    if not expected:
        return ""
    rows = [
        [
            name,
            f"{format_number(report[key])} tokens/s",
            f"{format_number(expected[key])} tokens/s",
            _over(report[key], expected[key]),
        ]
        for key, name in RATES.items()
    ]
    seconds = {
        name: (report[key], expected[key])
        for key, name in TIMES.items()
        if report[key] and key in expected  # a prediction warms nothing up
    }
    seconds |= {
        f"{name}, busy": (lane["busy_seconds"], expected["lanes"][name]["busy_seconds"])
        for name, lane in report["lanes"].items()
    }
    for name, pair in seconds.items():
        if any(pair):
            rows.append([name, *map(format_seconds, pair), _over(*pair)])
    columns = ["", "measured", "expected", "measured/expected"]
    return table("Measured beside expected", columns, rows, 3)


def _over(figure: float, other: float) -> str:
    """Return `figure` / `other` as text with two decimals; empty if `other` is 0."""
    return f"{figure / other:.2f}" if other else ""


def predictions_table(recording: Recording) -> str:
    """Return the HTML table of measured and predicted time by verb and lane; empty if nothing was predicted."""
    sums: dict[tuple[str, str], list[float]] = {}
    for each in recording.slices:
        prediction = recording.predictions.get(each.task.work)
        if prediction is not None:
            found = sums.setdefault((each.task.verb, each.lane.name), [0, 0.0, 0.0])
            for place, amount in enumerate((1, prediction, (each.end - each.start) / 1e9)):
                found[place] += amount
    largest = sorted(sums.items(), key=lambda item: -item[1][2])[:SHOWN_KINDS]
    rows = [
        [
            verb,
            lane,
            f"{tasks:,.0f}",
            format_seconds(measured),
            format_seconds(predicted),
            _over(measured, predicted),
        ]
        for (verb, lane), (tasks, predicted, measured) in largest
    ]
    columns = ["kind", "lane", "tasks", "measured", "expected, alone", "measured/expected"]
    return table("Measured beside expected, by kind of task", columns, rows, 4) if rows else ""

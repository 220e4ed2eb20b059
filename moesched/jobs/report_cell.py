"""Makes the HTML of a job's report in a notebook: figures, bottleneck, timeline, lanes, memories, first texts."""

from __future__ import annotations

from collections.abc import Mapping

from moesched.analysis.explanation import explain
from moesched.errors import BadInput
from moesched.report.cell_drawings import bottleneck_and_timeline, cell, figures_table, memory_table
from moesched.report.markup import paragraphs, table
from moesched.report.run_figures import RATES, TIMES
from moesched.runs.outcome import Report
from moesched.trace import read_trace
from moesched.units import format_seconds, format_token_rate

SHOWN_TEXTS, SHOWN_LETTERS = 3, 200


def report_html(report: Report, budget_bytes: Mapping[str, int], trace: str | None) -> str:
    """Return the HTML that a notebook shows for a report.

    Args:
        budget_bytes: budget of each memory.
        trace: file of the first batch's trace; None if there is none.
    """
    parts = [
        paragraphs(_endings(report)),
        figures_table(report.figures, _rates(report)),
        _from_trace(report, trace) or paragraphs(_busiest(report)),
        _lanes(report),
        memory_table("peak", report.peak_bytes, budget_bytes),
        paragraphs(_texts(report)),
    ]
    return cell(report.title, *filter(None, parts))


def _endings(report: Report) -> list[str]:
    failed = [f"The run failed: {report.failure}"] if report.failure else []
    return failed + (["The run was interrupted."] if report.interrupted else [])


def _rates(report: Report) -> dict[str, str]:
    rates = {name: format_token_rate(getattr(report, key)) for key, name in RATES.items()}
    return rates | {
        name: format_seconds(seconds) for key, name in TIMES.items() if (seconds := getattr(report, key))
    }


def _busiest(report: Report) -> list[str]:
    if not report.lanes:
        return []
    name, lane = max(report.lanes.items(), key=lambda item: item[1].busy_seconds)
    return [f"Busiest lane: {name}, {lane.utilization:.0%} of the time."]


def _from_trace(report: Report, trace: str | None) -> str:
    """Return HTML of bottleneck and timeline; empty if there is no trace, or its file is absent or of another run."""
    if trace is None:
        return ""
    try:
        recording, about = read_trace(trace)
    except BadInput:
        return ""
    if not recording.slices or (about.policy, about.model) != (report.policy, report.model):
        return ""
    return bottleneck_and_timeline(recording, explain(recording, about))


def _lanes(report: Report) -> str:
    rows = [
        [name, format_seconds(lane.busy_seconds), f"{lane.utilization:.0%}"]
        for name, lane in report.lanes.items()
    ]
    return table("", ["lane", "busy", "of the time"], rows, 2)


def _texts(report: Report) -> list[str]:
    return [
        f"[{number}] {words[:SHOWN_LETTERS]}"
        for number, words in enumerate((report.text or [])[:SHOWN_TEXTS])
    ]

"""Computes a simulation's uncertainty band (a range for each figure), and its figures at the machine's stated rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from moesched.jobs.report import JobReport
from moesched.planner.uncertainty import Figures, RunsProgress, ignore_runs, uncertainty
from moesched.runs.ranks import Rank


def with_band(
    report: JobReport, make_ranks: Callable[[], Sequence[Rank]], progress: RunsProgress = ignore_runs
) -> JobReport:
    """Return a simulation's report with its uncertainty band, and its figures at the machine's stated rates.

    A report of a run that was interrupted or failed is returned unchanged.

    Args:
        make_ranks: returns a new `Rank` for each node: a new policy, and its plan of the first batch.
        progress: called with (simulations done, all simulations).
    """
    if report.interrupted or report.failure is not None:
        return report
    expected = Figures(
        report.throughput_tokens_per_second,
        report.decode_step_seconds or 0.0,
        report.prefill_seconds,
    )
    found = uncertainty(make_ranks, expected, progress)
    return replace(report, band=found.band, at_peak=found.at_peak, widest_rate=found.widest_rate)

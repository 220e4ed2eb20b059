"""Runs a command's job, then writes and prints its report, also if the job ended early."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moesched.cli.failures import tell
from moesched.cli.options import ReportArguments
from moesched.cli.output import print_json, say
from moesched.cli.report_tables import print_report
from moesched.errors import BadInput, MoeschedError, PolicyError, attach_report
from moesched.jobs.batch_reports import JobEnding, reported
from moesched.jobs.report import JobReport, write_report
from moesched.system.signals import interruption


def hand_out(job: Callable[[], JobReport], given: ReportArguments, trace: Path | str | None) -> JobReport:
    """Run a job, write its report as JSON if the user named a file, print the report and return it.

    Args:
        job: runs the job, and returns its report.
        given: options for the report.
        trace: path of the run's trace, for the printed text; None if no trace is written.

    Raises:
        BadInput: the job cannot run, or the report or the trace cannot be written.
        Exception: the error that ended the job early. The report was written before and, unless the error is a bug
            of the policy or of moesched, printed.
    """
    ending = JobEnding()
    report = reported(job, ending)
    if given.json_report is not None:
        try:
            write_report(given.json_report, report)
        except BadInput as unwritten:
            attach_report(unwritten, report)
            ending.error = ending.error or unwritten
    if given.json:
        print_json(report.as_dict())
    elif ending.error is None or not _is_a_bug(ending.error):
        print_report(report, trace)
        if ending.error is None:
            say_where(trace, given.page)
    if report.failure is not None and ending.error is None:
        tell(f"after {_tokens(report)} tokens: {report.failure}")
    if report.interrupted:
        tell(f"{interruption()} after {_tokens(report)} tokens")
    ending.raise_error(report)
    return report


def say_where(trace: Path | str | None, html: Path | None) -> None:
    """Print the names of the trace and the HTML report, and how to open them."""
    if trace is not None:
        say(f"\ntrace: {trace}; see it with moesched view, or in https://ui.perfetto.dev")
    if html is not None:
        say(f"\nreport: {html}; open it in a browser")


def _is_a_bug(error: Exception) -> bool:
    """Test whether an error is a bug of the policy or of moesched, not bad input or a failed device."""
    return isinstance(error, PolicyError) or not isinstance(error, MoeschedError)


def _tokens(report: JobReport) -> int:
    return sum(map(len, report.tokens or []))

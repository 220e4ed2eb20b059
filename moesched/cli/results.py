"""Output of a job's report: printed and written first, so that a failed trace does not lose it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moesched.cli.failures import tell
from moesched.cli.output import print_json, print_report
from moesched.errors import NodeLost
from moesched.jobs.batch_reports import NotTraced
from moesched.jobs.report import JobReport, write_report
from moesched.trace.whole_file import require_writable


def hand_out(job: Callable[[], JobReport], *, json: bool, file: Path | None, trace: Path | None) -> JobReport:
    """Run a job, print its report and write it to `file`; the job writes its trace to `trace`.

    Raises:
        BadInput: the job cannot run, or the report or the trace cannot be written.
        NodeLost: a node of the cluster was lost, so the job ended early.
    """
    require_writable(file, "report")
    unfinished: NotTraced | NodeLost | None = None
    try:
        report = job()
    except (NotTraced, NodeLost) as error:
        if error.report is None:
            raise
        unfinished, report = error, error.report
    if json:
        print_json(report.as_dict())
    else:
        print_report(report)
        if trace is not None and unfinished is None:
            print(f"\ntrace: {trace}; open it in https://ui.perfetto.dev")
    if report.failure is not None and unfinished is None:
        tell(f"after {sum(map(len, report.tokens or []))} tokens: {report.failure}")
    if report.interrupted:
        tell(f"interrupted after {sum(map(len, report.tokens or []))} tokens")
    if file is not None:
        write_report(file, report)
    if unfinished is not None:
        raise unfinished
    return report

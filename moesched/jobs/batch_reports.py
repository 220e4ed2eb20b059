"""Collects the reports of successive batches, of which the last may have ended with an error."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import TypeVar, TypeVarTuple

import msgspec

from moesched.errors import BadInput, report_of
from moesched.jobs.report import JobReport, merge_reports
from moesched.runs.ending import Ending
from moesched.runs.outcome import Report
from moesched.system.signals import hold_signals, release_signals

T = TypeVar("T", bound=Report)
Arguments = TypeVarTuple("Arguments")


class NotTraced(BadInput):
    """The job is done, but its trace or HTML report could not be written; `report` has its results."""

    def __init__(self, error: BadInput, report: JobReport) -> None:
        super().__init__(str(error))
        self.report = report


class BatchReports:
    """Collects the reports of successive batches, and the first error that has a report; `merge` raises this error."""

    def __init__(self) -> None:
        self.all: list[JobReport] = []
        self._ending = Ending()

    def add(self, job: Callable[[*Arguments], JobReport], *arguments: *Arguments) -> None:
        """Run one batch, by the call `job(*arguments)`, and keep its report.

        Raises:
            Exception: the batch failed before it began, and so has no report.
        """
        try:
            self.all.append(job(*arguments))
        except Exception as error:
            report = report_of(error)
            if report is None:
                raise
            self.all.append(report)
            self._ending.error = self._ending.error or error

    def ended_early(self, number: int) -> bool:
        """Test whether batch `number`, from 0, has no report, or one that says that it was interrupted or failed."""
        if len(self.all) <= number:
            return True
        return self.all[number].interrupted or self.all[number].failure is not None

    def merge(self, *, requests: int, batches: int, padded: bool = False) -> JobReport:
        """Merge the reports of the batches that ran into one, which has no tokens for requests that did not run.

        Args:
            requests, batches: numbers of requests and of batches of the whole job, whether they ran or not.
            padded: whether prompts were padded to the longest.

        Raises:
            KeyboardInterrupt: the run was interrupted before the first batch had a report.
            Exception: the error of a batch, or of writing its trace, with the merged report as its attribute `report`.
        """
        if not self.all:
            raise KeyboardInterrupt
        report = merge_reports(self.all, requests=requests, batches=batches)
        report = msgspec.structs.replace(report, padded=padded)
        self._ending.raise_error(report)
        return report


class JobEnding(Ending):
    """Context of a job's run: a signal interrupts the run, and a later signal waits until the results are written."""

    def __enter__(self) -> JobEnding:
        release_signals()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        hold_signals()
        return super().__exit__(kind, error, trace)


def reported(run: Callable[[], T], ending: Ending) -> T:
    """Call `run` and return its report; an error that carries a report is kept in `ending`, to be raised later.

    Raises:
        Exception: the run failed before it began, and so has no report.
    """
    with ending:
        return run()
    report: T | None = None if ending.error is None else report_of(ending.error)
    if report is None:
        ending.raise_error()
        raise KeyboardInterrupt
    return report

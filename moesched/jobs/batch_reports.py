"""Reports of successive batches; a trace that could not be written is an error after the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from moesched.errors import BadInput
from moesched.jobs.report import JobReport, merge_reports


class NotTraced(BadInput):
    """The job is done, but its trace could not be written; `report` has its results."""

    def __init__(self, error: BadInput, report: JobReport) -> None:
        super().__init__(str(error))
        self.report = report


class BatchReports:
    """Reports of successive batches. If a trace cannot be written, they go on, and the error is raised at the end."""

    def __init__(self) -> None:
        self.all: list[JobReport] = []
        self._untraced: NotTraced | None = None

    def add(self, job: Callable[..., JobReport], *arguments: Any) -> None:
        """Run one batch."""
        try:
            self.all.append(job(*arguments))
        except NotTraced as error:
            self.all.append(error.report)
            self._untraced = self._untraced or error

    def ended_early(self, number: int) -> bool:
        """Whether a batch has no report, or its report says that it was interrupted or failed."""
        if len(self.all) <= number:
            return True
        return self.all[number].interrupted or self.all[number].failure is not None

    def merge(self, *, requests: int, batches: int, padded: bool = False) -> JobReport:
        """One report of all batches, including those that did not run.

        Raises:
            KeyboardInterrupt: not even the first batch has a report.
            NotTraced: a trace could not be written; the error has the report.
        """
        if not self.all:
            raise KeyboardInterrupt
        report = merge_reports(self.all, requests=requests, batches=batches)
        report = msgspec.structs.replace(report, padded=padded)
        if self._untraced is not None:
            raise NotTraced(self._untraced, report)
        return report

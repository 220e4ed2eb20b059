"""Ends a run that completed, was interrupted or failed; the error of a failed run carries the report of its results."""

from __future__ import annotations

from types import TracebackType

from moesched.errors import MoeschedError, TaskFailed, attach_report
from moesched.system.logs import Log
from moesched.system.source_lines import raising_line

_log = Log(__name__)


class Ending:
    """A context around a run that catches an interrupt or an error; `raise_error` raises the error later.

    Attributes:
        interrupted: whether Ctrl-C or a signal ended the run.
        error: the error that ended the run; None if there was none.
    """

    def __init__(self) -> None:
        self.interrupted = False
        self.error: Exception | None = None

    def __enter__(self) -> Ending:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, KeyboardInterrupt):
            self.interrupted = True
            if line := raising_line(error):
                _log.warning("interrupted in the policy", line=line)
        elif isinstance(error, Exception):
            self.error = error
        return error is None or self.interrupted or self.error is not None

    @property
    def failure(self) -> str | None:
        """The text of the error that ended the run, for a report; None if there is none.

        For a failed task this is the text of its cause, if moesched raised the cause.
        """
        error = self.error
        if error is None:
            return None
        cause = self._cause
        return str(cause if isinstance(cause, MoeschedError) else error) or type(error).__name__

    def raise_cause(self, kind: type[MoeschedError]) -> None:
        """Raise the cause of a failed task, if this cause is an error of the class `kind`; else do nothing."""
        if isinstance(cause := self._cause, kind):
            raise cause

    def raise_error(self, report: object = None) -> None:
        """Raise the error that ended the run, if there is one.

        report: the run's results so far, which become the error's attribute `report`; None if the run had not begun.
        """
        error, self.error = self.error, None
        if error is None:
            return
        if report is not None:
            attach_report(error, report)
        try:
            raise error
        finally:
            del error  # it refers to this frame

    @property
    def _cause(self) -> BaseException | None:
        return self.error.__cause__ if isinstance(self.error, TaskFailed) else None

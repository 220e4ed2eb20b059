"""`run_model`: generates text on real hardware, by one call of a session."""

from __future__ import annotations

from moesched.jobs.options import CallOptions, RunOptions, SessionOptions
from moesched.jobs.report import JobReport
from moesched.jobs.session import Session
from moesched.keywords import takes
from moesched.options import part_of


@takes(RunOptions)
def run_model(given: RunOptions) -> JobReport:
    """Generate text on real hardware: open a session, make one call, and close it.

    As with `Session.run`, Ctrl-C or weights that cannot be read end the run early, with a report.

    Raises:
        BadInput: an argument cannot be used.
        NotTraced: the trace could not be written; the error has the report.
        PolicyError: the policy submitted something illegal; it is raised at the policy's line.
        TaskFailed: a task raised an error on its lane.
    """
    with Session(**part_of(given, SessionOptions)) as session:
        return session.run(**part_of(given, CallOptions))

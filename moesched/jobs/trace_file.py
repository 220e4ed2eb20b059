"""Traces of jobs: their recorders, file names and metadata."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from moesched.errors import BadInput
from moesched.jobs.batch_reports import NotTraced
from moesched.jobs.report import JobReport
from moesched.runs.listeners import Listener
from moesched.steps.plan import Plan
from moesched.system.logs import Log
from moesched.trace import About, Clock, LastSteps, Recorder, Recording, write_trace

MOST_TRACED_TASKS = 500_000

_log = Log(__name__)


def recorder_of(plan: Plan) -> Recorder | LastSteps:
    """A recorder of a whole run, or of its last steps if the run is too long."""
    per_step = 8 * len(plan.layers) * len(plan.micro_batches) + 2 * len(plan.layout.pages)
    if per_step * plan.batch.new_tokens <= MOST_TRACED_TASKS:
        return Recorder()
    steps = max(2, MOST_TRACED_TASKS // per_step)
    _log.warning("the run is too long for a whole trace: its last steps are kept", steps=steps)
    return LastSteps(steps)


def write_job_trace(
    path: Path, recorder: Recorder | LastSteps, report: JobReport, listener: Listener
) -> None:
    """Write the trace of the batch that `report` describes.

    Raises:
        NotTraced: it cannot be written.
    """
    write_recording(path, recorder.recording(), report, listener)


def write_recording(
    path: Path,
    recording: Recording,
    report: JobReport,
    listener: Listener,
    clocks: Mapping[str, Clock] | None = None,
) -> None:
    """Write the recording of the batch that `report` describes.

    Args:
        clocks: corrections of the nodes' clocks, by rank.

    Raises:
        NotTraced: it cannot be written.
    """
    about = About(
        driver="realtime" if report.measured else "virtual",
        policy=report.policy,
        model=report.model,
        machine=report.place,
        plan=msgspec.to_builtins(report.plan),
        clocks=dict(clocks or {}),
    )
    listener.writing(path)
    try:
        write_trace(path, recording, about)
    except BadInput as error:
        raise NotTraced(error, report) from error
    finally:
        listener.ran()

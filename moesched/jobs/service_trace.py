"""The trace of requests that were served."""

from __future__ import annotations

from pathlib import Path

import msgspec

from moesched.jobs.trace_file import roofs_of
from moesched.runs.service_report import ServiceReport
from moesched.runs.serving import Served, Serving
from moesched.steps.plan import Plan
from moesched.trace import About, Recorder, write_trace
from moesched.trace.recording import RequestSpan


def write_service_trace(
    path: Path | str, recorder: Recorder, serving: Serving, report: ServiceReport, plan: Plan
) -> None:
    """Write the tasks of a run, and its requests as spans.

    Raises:
        BadInput: the file cannot be written.
    """
    recording = recorder.recording()
    recording.requests = [span_of(served, serving.loaded) for served in serving.requests.values()]
    about = About(
        driver="realtime" if report.measured else "virtual",
        policy=report.policy,
        model=report.model,
        machine=report.machine,
        plan=msgspec.to_builtins(report.capacity),
        roofs=roofs_of(plan.machine, report.dtype),
    )
    write_trace(path, recording, about)


def span_of(served: Served, loaded: int) -> RequestSpan:
    """A request's span on the clock of a trace, where the weights were loaded at `loaded`."""

    def on_clock(time: int) -> int:
        return time + loaded if time >= 0 else time

    return RequestSpan(
        served.request.number,
        served.request.arrives + loaded,
        on_clock(served.entered),
        on_clock(served.times[0] if served.times else -1),
        on_clock(served.ended),
        len(served.tokens),
    )

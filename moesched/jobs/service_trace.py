"""Records and writes traces of servers: the last tasks that ran, and requests as spans."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from pathlib import Path

import msgspec

from moesched.jobs.trace_file import roofs_of, tasks_of_a_step
from moesched.runs.service_report import RunNames
from moesched.runs.serving import Served, Serving, ServingListener
from moesched.serving.capacity import Capacity
from moesched.steps.plan import Plan
from moesched.trace import About, LastSteps, Recorder, write_trace
from moesched.trace.recording import RequestSpan

MOST_TASKS = 200_000
"""Approximate number of tasks that a server keeps for its trace: some 100 MB."""
MOST_REQUESTS = 10_000
"""Largest number of ended requests that a server keeps for its trace."""


def last_steps_of(plan: Plan) -> LastSteps:
    """Make a recorder that keeps a server's last steps, about MOST_TASKS tasks in all."""
    return LastSteps(max(2, MOST_TASKS // tasks_of_a_step(plan)))


class RequestSpans(ServingListener):
    """Listener that keeps, for a trace, the rate of generated tokens, and the spans of requests that ended recently.

    Args:
        listener: another listener that gets the same calls; None for none.

    Attributes:
        ended: the requests' spans, in the order in which the requests ended.
    """

    def __init__(self, listener: ServingListener | None) -> None:
        self._listener = listener or ServingListener()
        self._loaded = 0
        self._tokens = 0
        self._last = 0
        self.ended: deque[RequestSpan] = deque(maxlen=MOST_REQUESTS)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of ended requests per second, from the end of loading to the last of these tokens; 0 without any."""
        return self._tokens / (self._last / 1e9) if self._last else 0.0

    def loaded(self, serving: Serving) -> None:
        """Keep the time at which weights were loaded, since the times of requests count from there."""
        self._loaded = serving.loaded
        self._listener.loaded(serving)

    def token(self, served: Served) -> None:
        """Keep the span of a request, if the request ends with this token, and count its tokens."""
        if served.ending is not None:
            self.ended.append(span_of(served, self._loaded))
            self._tokens += len(served.tokens)
            self._last = max(self._last, *served.times, 0)
        self._listener.token(served)

    def step(self, serving: Serving) -> None:
        """Pass the call on to the other listener."""
        self._listener.step(serving)


def write_service_trace(
    path: Path | str,
    recorder: Recorder | LastSteps,
    spans: Iterable[RequestSpan],
    ran: RunNames,
    capacity: Capacity,
    plan: Plan,
    tokens_per_second: float,
) -> None:
    """Write the recorded tasks of a run, and its requests as spans.

    Requests that ended before the first recorded task started, or have not ended, are left out.

    tokens_per_second: all generated tokens over the time from the end of loading to the last token.

    Raises:
        BadInput: the file cannot be written.
    """
    recording = recorder.recording()
    recording.requests = sorted(
        (span for span in spans if span.ended >= recording.start),
        key=lambda span: (span.arrived, span.request),
    )
    about = About(
        driver="realtime" if ran.measured else "virtual",
        policy=ran.policy,
        model=ran.model,
        machine=ran.machine,
        plan=msgspec.to_builtins(capacity),
        roofs=roofs_of(plan.machine, ran.dtype),
        costs_measured=not ran.measured and bool(plan.machine.cost_table),
        tokens_per_second=tokens_per_second,
    )
    write_trace(path, recording, about)


def span_of(served: Served, loaded: int) -> RequestSpan:
    """Return a request's span, in nanoseconds of a trace's clock.

    Args:
        loaded: the time on that clock when weights were loaded; times of requests count from there.
    """

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

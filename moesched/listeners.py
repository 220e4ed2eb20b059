"""Listeners: told how a run goes on, for progress bars, streamed text and figures by kind of task."""

from __future__ import annotations

from pathlib import Path

from moesched.plan import Plan
from moesched.tasks import Task
from moesched.trace.summary import KindUse


class Listener:
    """What a run tells of itself. Every method does nothing here; a listener overrides those that it cares for."""

    def planned(self, plan: Plan) -> None:
        """A batch is about to run by this plan."""

    def ended(self, task: Task) -> None:
        """A task ended. Called from any thread but never at once, tens of thousands of times a second: be quick."""

    def generated(self, request: int, token: int, text: str) -> None:
        """A request got a token; `text` is what that makes final of its text."""

    def finished(self, request: int, text: str) -> None:
        """A request gets no more tokens; `text` is the last of its text."""

    def ran(self) -> None:
        """The batch is through, or was interrupted."""

    def writing(self, trace: Path) -> None:
        """The batch's trace is about to be written, which may take a while; `ran` is told again afterwards."""


class KindMeter:
    """Adds up tasks by what they are and where they ran, loading included."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], list[float]] = {}

    def ended(self, task: Task) -> None:
        """Count a task."""
        work = task.work
        key = (task.verb, task.lane.name)
        sums = self._sums.get(key)
        if sums is None:
            sums = self._sums[key] = [0, 0, 0.0, 0.0]
        sums[0] += 1
        sums[1] += task.end - task.start
        sums[2] += work.nbytes
        sums[3] += work.flops

    def kinds(self) -> list[KindUse]:
        """The sums and what rates they come to."""
        return [
            kind_use(verb, lane, int(tasks), nanoseconds / 1e9, nbytes, flops)
            for (verb, lane), (tasks, nanoseconds, nbytes, flops) in sorted(self._sums.items())
        ]


def kind_use(kind: str, lane: str, tasks: int, seconds: float, nbytes: float, flops: float) -> KindUse:
    """One kind of task on one lane, with its rates while it ran."""
    return KindUse(
        kind=kind,
        lane=lane,
        tasks=tasks,
        seconds=seconds,
        nbytes=nbytes,
        flops=flops,
        gigabytes_per_second=nbytes / seconds / 1e9 if seconds else 0.0,
        gigaflops_per_second=flops / seconds / 1e9 if seconds else 0.0,
    )

"""Computes the extra time of transfers on a link that was idle, on machines where it was measured."""

from __future__ import annotations

from collections.abc import Mapping

from moesched.machines import Machine
from moesched.machines.calibrated import PAUSE_SECONDS, RESUME
from moesched.seams import Delay
from moesched.tasks import Lane, Task

_PAUSE = round(PAUSE_SECONDS * 1e9)


class ResumedLink:
    """Gives the extra time of a transfer that begins after its link was idle: a `Delay` of the virtual driver.

    Args:
        nanoseconds: the extra time of a transfer that begins after `PAUSE_SECONDS` or more without one.
    """

    def __init__(self, nanoseconds: int) -> None:
        self._nanoseconds = nanoseconds
        self._before: Task | None = None

    def __call__(self, task: Task, now: int) -> int:
        """Return the extra nanoseconds of a task that starts now; the tasks before it have ended."""
        before, self._before = self._before, task
        return self._nanoseconds if before is None or now - before.end >= _PAUSE else 0


def resumed_link_delays(machine: Machine, lanes: Mapping[str, Lane]) -> dict[Lane, Delay]:
    """Return the functions that give transfers on links extra time, by lane; empty if it was not measured."""
    extra = {
        point.operation.removeprefix(RESUME): point.seconds
        for point in machine.cost_table
        if point.operation.startswith(RESUME)
    }
    return {lane: ResumedLink(round(extra[name] * 1e9)) for name, lane in lanes.items() if name in extra}

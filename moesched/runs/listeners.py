"""Listeners of a run's progress, for progress bars, streamed text and figures by kind of task."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from moesched.seams import Device, Observer
from moesched.steps.plan import Plan
from moesched.tasks import Task
from moesched.trace.summary import KindUse

if TYPE_CHECKING:
    from moesched.drivers.capture import Sized, StepGraph
    from moesched.drivers.replay import ReplayedRun


class Listener:
    """Base of listeners. Every method except `replayed` does nothing; a listener overrides those that it needs."""

    def opened(self, device: Device) -> None:
        """Called once the run's device is open, before any batch begins; with several ranks, the first one's."""

    def preparing(self, what: str, done: float, total: float) -> None:
        """Called while the device prepares a batch: allocates memory, or measures itself.

        Args:
            what: the preparation's name.
            done: the part of the work that is done.
            total: the whole work, in the same unit.
        """

    def planned(self, plan: Plan) -> None:
        """Called when a batch with this plan is about to run."""

    def loading(self, done: int, total: int) -> None:
        """Called once `done` of `total` resident pages are loaded; only in cluster runs, which never call `ended`."""

    def ended(self, task: Task) -> None:
        """Called when a task has ended, on any thread, one call at a time, up to tens of thousands a second."""

    def replayed(self, run: ReplayedRun) -> None:
        """Called once a replayed run is over; by default passes the run's tasks to `ended`, which takes time."""
        if type(self).ended is not Listener.ended:
            for task in run.tasks():
                self.ended(task)

    def generated(self, request: int, token: int, text: str) -> None:
        """Called with each token; `text` is the new text, maybe empty, or without a tokenizer the token's number."""

    def finished(self, request: int, text: str) -> None:
        """Called once a request is complete; `text` is the last part of its text."""

    def ran(self) -> None:
        """Called once the batch is complete, or was interrupted."""

    def estimating(self, done: int, total: int) -> None:
        """Called as the simulations for a prediction's uncertainty band progress; then `ran` is called again.

        done, total: number of finished simulations, 0 in the first call; and number of all simulations.
        """

    def writing(self, trace: Path) -> None:
        """Called before the batch's trace is written, which may take a while; `ran` is called again afterwards."""


def observers_in(listener: Listener) -> list[Observer]:
    """Return a list of the listener if it overrides `ended`, else an empty list, since a call per task takes time."""
    return [] if type(listener).ended is Listener.ended else [listener]


class KindMeter:
    """Sums the numbers, times, bytes and FLOPs of tasks by verb and lane; tasks that load weights count, too."""

    def __init__(self) -> None:
        self._sums: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0, 0.0])

    def ended(self, task: Task) -> None:
        """Add a task to the sums of its verb and lane."""
        work, sums = task.work, self._sums[task.verb, task.lane.name]
        sums[0] += 1
        sums[1] += task.end - task.start
        sums[2] += work.nbytes
        sums[3] += work.flops

    def replayed(self, run: ReplayedRun) -> None:
        """Add the tasks of a replayed run to the sums, without making `Task` objects."""
        groups: dict[StepGraph, dict[tuple[Sized, str], list[int]]] = {}
        first = 0
        for graph, works in zip(run.steps, run.works, strict=True):
            if graph not in groups:
                groups[graph] = _alike(graph)
            for (sized, lane), positions in groups[graph].items():
                taken = sum(run.ends[first + each] - run.starts[first + each] for each in positions)
                work = works.get(sized)
                if work is not None:
                    nbytes, flops = len(positions) * work.nbytes, len(positions) * work.flops
                else:
                    nbytes = sum(graph.tasks[each].work.nbytes for each in positions)
                    flops = sum(graph.tasks[each].work.flops for each in positions)
                self._add(sized[1], lane, len(positions), taken, nbytes, flops)
            first += len(graph.tasks)

    def kinds(self) -> list[KindUse]:
        """Return the sums of each verb's tasks on each lane, with their rates."""
        return [
            kind_use(verb, lane, int(tasks), nanoseconds / 1e9, nbytes, flops)
            for (verb, lane), (tasks, nanoseconds, nbytes, flops) in sorted(self._sums.items())
        ]

    def _add(self, verb: str, lane: str, tasks: int, taken: int, nbytes: float, flops: float) -> None:
        sums = self._sums[verb, lane]
        sums[0] += tasks
        sums[1] += taken
        sums[2] += nbytes
        sums[3] += flops


def _alike(graph: StepGraph) -> dict[tuple[Sized, str], list[int]]:
    """Return a step's tasks on lanes, as positions in `graph.tasks`, by ((micro-batch, verb, kind of layer), lane)."""
    positions: dict[tuple[Sized, str], list[int]] = {}
    for position, task in enumerate(graph.tasks):
        if graph.lanes[position] >= 0:
            positions.setdefault((graph.key(task), task.lane.name), []).append(position)
    return positions


def kind_use(kind: str, lane: str, tasks: int, seconds: float, nbytes: float, flops: float) -> KindUse:
    """Make the report entry of one verb's tasks on one lane, with their rates while they ran.

    Args:
        kind: the tasks' verb.
        tasks: number of tasks.
        seconds, nbytes, flops: sums of the tasks' times, bytes moved and floating-point operations.
    """
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

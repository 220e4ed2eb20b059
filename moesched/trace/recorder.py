"""Recorders: observers that keep all tasks that ran, or only those of the first or last steps.

Keeping a task is a single list append, since the virtual driver finishes hundreds of thousands of tasks per second;
everything else is computed when the recording is requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from moesched.engine import Engine
from moesched.machines.cost_model import CostModel
from moesched.steps.memory import Memory, Pool
from moesched.tasks import Lane, PageTransfer, Task
from moesched.trace.recorded_tasks import RankRecord, costs_of, predictions_of, record
from moesched.trace.recording import Recording

if TYPE_CHECKING:
    from moesched.drivers.replay import ReplayedRun


class _RankRecorder:
    """Base class of recorders: collects the data of the ranks that it watches.

    Attributes:
        origin: the time on the driver's clock that is time 0 of the recording, in nanoseconds.
        sharing: whether concurrent tasks slow each other down in this simulated run.
        cost: the cost model that predicts the times of a measured run's tasks; None to predict nothing.
    """

    def __init__(self) -> None:
        self.origin = 0
        self.sharing = False
        self.cost: CostModel | None = None
        self._ranks: list[RankRecord] = []
        self._rank_of: dict[Lane, int] = {}

    def watch(
        self, engine: Engine, memories: Mapping[str, Memory] | None = None, pools: Iterable[Pool] = ()
    ) -> None:
        """Record one more rank. Call it before the rank's engine runs; ranks are numbered in the order of calls.

        Args:
            memories: objects that know the peak bytes of the rank's memories, by name; None for none.
            pools: the rank's pools.
        """
        self._rank_of.update(dict.fromkeys(engine.lanes, len(self._ranks)))
        self._ranks.append(RankRecord(engine, memories or {}, pools))

    def _recorded(self, tasks: Sequence[Task], *, trimmed: bool) -> Recording:
        recording = record(tasks, self._ranks, self.origin, trimmed=trimmed)
        recording.costs = costs_of(tasks, sharing=self.sharing)
        if self.cost is not None:
            recording.predictions = predictions_of(tasks, self.cost)
        return recording


class Recorder(_RankRecorder):
    """Observer that keeps every task that ran.

    Call `watch` with the engine of every rank, and pass the recorder to the driver as an observer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._tasks: list[Task] = []
        self._append = self._tasks.append
        self._replayed: list[Callable[[], Iterable[Task]]] = []

    @property
    def ended(self) -> Callable[[Task], None]:
        """The function that drivers call with each finished task, the `append` of a list."""
        return self._append

    def replayed(self, run: ReplayedRun) -> None:
        """Add a run that was replayed from a captured schedule; its tasks are made when the recording is requested."""
        self._replayed.append(run.tasks)

    def recording(self) -> Recording:
        """Return the recording of the tasks that ran so far."""
        tasks = [*self._tasks, *(task for replayed in self._replayed for task in replayed())]
        return self._recorded(tasks, trimmed=False)


class FirstSteps(Recorder):
    """Observer that keeps only the tasks of loading and of the first steps; it is used like `Recorder`.

    Further steps are dropped once both `steps` steps and `tasks` tasks are kept.

    Args:
        steps: the least number of steps to keep, the prefill included.
        tasks: the least number of tasks to keep; the step in which this number is reached is kept whole.
    """

    def __init__(self, steps: int, tasks: int = 0) -> None:
        super().__init__()
        self._fewest = steps
        self._most = tasks
        self._end: int | None = None
        """The first step that is not kept, once it is known."""
        self._stopped: set[int] = set()

    @property
    def ended(self) -> Callable[[Task], None]:
        """The function that drivers call with each finished task, which keeps tasks of the first steps."""
        return self._keep

    def replayed(self, run: ReplayedRun) -> None:
        """Add the first steps of a run that was replayed from a captured schedule."""
        self._replayed.append(lambda: self._first_of(run.tasks()))

    def _keep(self, task: Task) -> None:
        if self._end is None:
            self._append(task)
            if self._is_enough(len(self._tasks), task):
                self._end = task.step + 1
                self._tasks[:] = [each for each in self._tasks if each.step < self._end]
        elif task.step < self._end:
            self._append(task)
        elif (rank := self._rank_of[task.lane]) not in self._stopped:  # it has submitted all earlier steps
            self._stopped.add(rank)
            self._ranks[rank].stop()

    def _first_of(self, tasks: Iterable[Task]) -> Iterator[Task]:
        end = None
        for count, task in enumerate(tasks, 1):
            if end is not None and task.step >= end:
                return
            if end is None and self._is_enough(count, task):
                end = task.step + 1
            yield task

    def _is_enough(self, count: int, task: Task) -> bool:
        return count >= self._most and task.step + 1 >= self._fewest


class LastSteps(_RankRecorder):
    """Observer that keeps only the tasks of the last steps, for long runs; it is used like `Recorder`.

    Args:
        steps: number of steps to keep, at least 1; loading counts as a step.
    """

    def __init__(self, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"a recorder of the last {steps} steps would keep nothing: ask for 1 or more")
        super().__init__()
        self._most = steps
        self._steps: dict[int, list[Task]] = {}
        self._first: int | None = None
        self._dropped = 0

    def ended(self, task: Task) -> None:
        """Keep a finished task, and drop the tasks of the earliest step if more than `steps` steps are kept."""
        tasks = self._steps.get(task.step)
        if tasks is not None:
            tasks.append(task)
        elif self._first is not None and task.step < self._first:
            self._forget([task])
        else:
            self._steps[task.step] = [task]
            if len(self._steps) > self._most:
                self._trim()

    def recording(self) -> Recording:
        """Return the recording of the last steps."""
        tasks = [task for kept in self._steps.values() for task in kept]
        self._trim_records()
        return self._recorded(tasks, trimmed=self._first is not None)

    def _trim(self) -> None:
        self._forget(self._steps.pop(min(self._steps)))
        self._first = min(self._steps)
        self._dropped += 1
        if (
            self._dropped % (1 + self._most // 4) == 0
        ):  # records of all steps are looked through, so not each time
            self._trim_records()

    def _trim_records(self) -> None:
        if self._first is None:
            return
        for number, rank in enumerate(self._ranks):
            # Steps are submitted one after another, so the earliest kept task belongs to the first kept step.
            ids = [task.id for task in self._steps[self._first] if self._rank_of.get(task.lane) == number]
            if ids:
                rank.trim(min(ids), self._first)

    def _forget(self, tasks: Iterable[Task]) -> None:
        """Drop `tasks`, but keep a note of the memory slots that they filled."""
        for task in tasks:
            if isinstance(task, PageTransfer) and task.slots:
                self._ranks[self._rank_of[task.lane]].filled.update(task.slots)

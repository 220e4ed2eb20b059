"""Collects times of a small model's tasks on a machine with a GPU: dispatch, host attention, speeds beside copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from moesched.calibration.contention import Observed, rates_beside
from moesched.calibration.gpu_probe import CPU, GPU, HOST, PINNED
from moesched.calibration.task_times import LEAST_SECONDS, RunKey, TaskTimes, point
from moesched.machines import FEW_ROWS, MANY_ROWS, CostPoint
from moesched.machines.calibrated import ATTENTIONS, CACHE_WRITING, DISPATCH
from moesched.machines.cost_model import at_once
from moesched.machines.gpu_cost import calls
from moesched.machines.machine import ATTENTION, CACHE_WRITE
from moesched.tasks import Task
from moesched.work import Work

ON_HOST = (ATTENTION, FEW_ROWS, MANY_ROWS, CACHE_WRITE)


class Alike(NamedTuple):
    """Key of tasks in one run that should take equally long.

    Attributes:
        resource: the processor or link that the tasks run on.
        kind: the `Work.kind` of the tasks, such as "cpu_attention".
        calls: number of kernel calls that each task makes.
    """

    resource: str
    kind: str
    micro_batch: int
    prefill: bool
    calls: float


class Timed(NamedTuple):
    """The `Work` of a task (its operation, FLOPs and bytes), and the seconds that the task took."""

    work: Work
    seconds: float


class GpuTasks:
    """Timed tasks of several runs of a small model on a machine with a GPU, and the figures that follow from them."""

    def __init__(self) -> None:
        self._beside: dict[tuple[str, bool], list[Observed]] = {}
        """Tasks timed beside others, by (class of work, whether the run staged pages)."""
        self._runs: list[dict[Alike, list[Timed]]] = []
        self._alone = TaskTimes()

    def add(self, run: RunKey, tasks: Sequence[Task]) -> None:
        """Add the tasks of a run in which no page was copied while other tasks ran."""
        alike: dict[Alike, list[Timed]] = {}
        for task in filter(_tells_of_dispatch, tasks):
            work = task.work
            key = Alike(work.resource, work.kind, task.micro_batch, task.phase == "prefill", calls(work))
            alike.setdefault(key, []).append(Timed(work, (task.end - task.start) / 1e9))
        self._runs.append(alike)
        self._alone.add(run, [task for task in tasks if _is_timed_beside(task)])

    def add_beside(self, run: RunKey, tasks: Sequence[Task]) -> None:
        """Add observations of a run in which pages were copied while other tasks ran.

        Each task's time is compared with that of the same task alone, which `add` collected.
        """
        stages = any(task.lane.name == f"{HOST}->{PINNED}" for task in tasks)
        for work_class, observed in self._alone.observed(run, _off_gpu(tasks)).items():
            renamed = [each._replace(beside=_page_locked_beside(each.beside)) for each in observed]
            self._beside.setdefault((_page_locked(work_class), stages), []).extend(renamed)

    def rates(self) -> dict[tuple[str, str], float]:
        """Return speeds of the host's work beside other work, and of copies beside the host's work.

        The keys are (class of work, classes that run at the same time). The speeds are relative to running alone. Some
        runs stage pages, which means that they copy them to page-locked memory first. Such runs count only for keys
        that no other run has: those of these copies, for example.
        """
        rates: dict[tuple[str, str], float] = {}
        for (work_class, _), observed in sorted(self._beside.items(), key=lambda each: each[0][1]):
            for beside, rate in rates_beside(observed).items():
                if {work_class, *beside.split(" + ")} & set(ON_HOST):
                    rates.setdefault((work_class, beside), rate)
        return rates

    def host_attention(self) -> list[float]:
        """Return the bytes of KV cache per second that attention on the host read in each run.

        Two micro-batches with equally many sequences are compared, one with short and one with long sequences. The rate
        is the difference in their bytes over the difference in their times. Runs in which the long sequences took no
        longer than the short ones are left out.
        """
        rates = []
        for alike in self._runs:
            by_rows: dict[int, list[tuple[float, float]]] = {}
            for key, timed in alike.items():
                if key.resource == CPU and key.kind == "cpu_attention":
                    times = _median_bytes(timed), median(each.seconds for each in timed)
                    by_rows.setdefault(timed[0].work.tokens, []).append(times)
            most = max(by_rows.values(), key=lambda times: len(times))
            (short, before), *_, (long, after) = sorted(most)
            if after > before:
                rates.append((long - short) / (after - before))
        return rates

    def points(self, running: Callable[[Work], float]) -> list[CostPoint]:
        """Return dispatch times as points of the cost table: one for each resource, kind, number of calls and bytes.

        The time of a key `Alike` is the median over the tasks of a run, then over the runs. Several keys may belong to
        one point: two that differ only in their micro-batch, for example. The point then gets the shortest of their
        times, since longer ones include waiting for something else.

        Args:
            running: returns the seconds of the computation or copy of a given `Work` on the host or a link; they are
                subtracted from the task's time.
        """
        found: dict[Alike, list[tuple[float, float]]] = {}
        for alike in self._runs:
            for key, timed in alike.items():
                moved = 0.0 if key.resource in (GPU, CPU) else _median_bytes(timed)
                seconds = median(_dispatch(each, running) for each in timed)
                found.setdefault(key, []).append((moved, seconds))
        fastest: dict[CostPoint, CostPoint] = {}
        for key, times in found.items():
            each = _point(key, *map(median, zip(*times, strict=True)))
            same = replace(each, seconds=0.0)
            fastest[same] = min(each, fastest.get(same, each), key=lambda point: point.seconds)
        return [fastest[key] for key in sorted(fastest, key=_order)]

    def speeds(self) -> list[float]:
        """Return the speed of dispatch on the GPU in each run, relative to the median run.

        The speed of a run is the median over all kinds of task.
        """
        times = [
            {
                key: median(each.seconds for each in timed)
                for key, timed in alike.items()
                if key.resource == GPU
            }
            for alike in self._runs
        ]
        usual = {key: median(run[key] for run in times if key in run) for run in times for key in run}
        return [median(usual[key] / seconds for key, seconds in run.items()) for run in times]


def _is_timed_beside(task: Task) -> bool:
    """Test whether a task runs on the host, or copies pages or keys and values: only these are timed beside copies."""
    return task.work.resource == CPU or task.verb in ("fetch", CACHE_WRITING)


def _tells_of_dispatch(task: Task) -> bool:
    """Test whether a task takes little longer than its dispatch, so that its time is a measure of dispatch.

    Fetches take longer, and so do all kernels of a prefill except attention.
    """
    if task.verb == "fetch":
        return False
    copies = task.work.resource not in (GPU, CPU)
    return task.phase == "decode" or copies or task.work.parts[0].operation in ATTENTIONS


def _dispatch(timed: Timed, running: Callable[[Work], float]) -> float:
    """Return the seconds of a task's dispatch.

    On the GPU the whole task counts as dispatch; elsewhere, the task's time less the running time of its work.

    Args:
        running: returns the seconds that a given `Work`, of the host or of a link, takes once it has started.
    """
    work, seconds = timed
    return seconds if work.resource == GPU else max(0.0, seconds - running(work))


def _point(key: Alike, moved: float, seconds: float) -> CostPoint:
    measured = point(f"{DISPATCH} {key.kind}", "", key.calls, moved, max(LEAST_SECONDS, seconds))
    return replace(measured, resource=key.resource)


def _order(point: CostPoint) -> tuple[str, str, float, float]:
    return point.resource, point.operation, point.size, point.rows


def _page_locked(work_class: str) -> str:
    """Return "host->gpu" for the class of copies from page-locked memory to the GPU, and any other class unchanged."""
    return f"{HOST}->{GPU}" if work_class == f"{PINNED}->{GPU}" else work_class


def _page_locked_beside(beside: Mapping[str, float]) -> dict[str, float]:
    """Return observed seconds by mix of classes, with the classes renamed by `_page_locked`.

    Runs with and without staging then have equal names.
    """
    return {at_once(map(_page_locked, mix.split(" + "))): seconds for mix, seconds in beside.items()}


def _off_gpu(tasks: Iterable[Task]) -> list[Task]:
    """Return the tasks of the host and of links, without GPU kernels, which slow nothing outside the GPU."""
    return [task for task in tasks if task.work.resource != GPU]


def _median_bytes(timed: Iterable[Timed]) -> float:
    return median(each.work.nbytes for each in timed)

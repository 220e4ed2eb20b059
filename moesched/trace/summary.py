"""Sums a recording by lane, kind of task and step, for reports, comparisons and benchmarks."""

from __future__ import annotations

import msgspec

from moesched.trace.recording import Recording, Slice


class LaneSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The use of one lane (queue of tasks) after loading.

    Attributes:
        tasks: number of tasks.
        utilization: share of the time after loading in which the lane was busy, from 0 to 1.
        nbytes, flops: bytes and FLOPs of all tasks.
    """

    rank: int
    lane: str
    tasks: int
    busy_seconds: float
    utilization: float
    nbytes: float = msgspec.field(name="bytes")
    flops: float


class KindUse(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of all tasks with one verb (kind of task) on lanes with one name, over all ranks and with loading.

    Attributes:
        kind: the verb.
        tasks: number of tasks.
        seconds: total duration of the tasks.
        gigabytes_per_second, gigaflops_per_second: bytes and FLOPs of the tasks over their total duration.
    """

    kind: str
    lane: str
    tasks: int
    seconds: float
    nbytes: float = msgspec.field(name="bytes")
    flops: float
    gigabytes_per_second: float
    gigaflops_per_second: float


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """The times of one step, in seconds since the run's start.

    Attributes:
        step: -1 for loading, 0 for the prefill, then 1, 2, ...
        start: the end of the previous step.
        end: the end of the step's last `sample` task, or of the step's last task if the step has no `sample` task.
    """

    step: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Duration of the step in seconds."""
        return self.end - self.start


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Totals of a recording.

    Attributes:
        seconds: time from the recording's start to the end of its last task.
        tasks, edges, failed, cancelled: numbers of tasks, of dependencies, of failed tasks and of cancelled tasks.
        nbytes_moved: bytes of all transfers of pages.
        peak_bytes: the largest number of bytes that any rank's plan reserves, by memory.
    """

    seconds: float
    tasks: int
    edges: int
    failed: int
    cancelled: int
    nbytes_moved: float = msgspec.field(name="bytes_moved")
    lanes: list[LaneSummary]
    kinds: list[KindUse]
    steps: list[StepTime]
    peak_bytes: dict[str, int]


def summarize(recording: Recording) -> Summary:
    """Return the totals of a recording, also by lane, by kind of task and by step."""
    steps = _steps(recording)
    return Summary(
        seconds=(recording.end - recording.start) / 1e9,
        tasks=len(recording.slices),
        edges=recording.edges,
        failed=sum(each.state == "failed" for each in recording.slices),
        cancelled=len(recording.cancelled),
        nbytes_moved=sum(each.task.nbytes for each in recording.slices if each.task.type == "PageTransfer"),
        lanes=_lanes(recording, steps),
        kinds=_kinds(recording),
        steps=steps,
        peak_bytes=_peaks(recording),
    )


class _Sum:
    """Sums over tasks that ran: number of tasks, nanoseconds, bytes and FLOPs."""

    __slots__ = ("flops", "nanoseconds", "nbytes", "tasks")

    def __init__(self) -> None:
        self.tasks = 0
        self.nanoseconds = 0
        self.nbytes = 0.0
        self.flops = 0.0

    def add(self, each: Slice) -> None:
        self.tasks += 1
        self.nanoseconds += each.end - each.start
        self.nbytes += each.task.nbytes
        self.flops += each.task.flops


def _lanes(recording: Recording, steps: list[StepTime]) -> list[LaneSummary]:
    """Return the use of each lane after loading; if the recording has only loading, the use during loading."""
    only_loading = all(each.step < 0 for each in recording.slices)
    loaded = next((step.end for step in steps if step.step < 0 and not only_loading), recording.start / 1e9)
    window = recording.end / 1e9 - loaded
    sums = {lane: _Sum() for lane in recording.lanes}
    for each in recording.slices:
        if each.step >= 0 or only_loading:
            sums[each.lane].add(each)
    return [
        LaneSummary(
            rank=lane.rank,
            lane=lane.name,
            tasks=total.tasks,
            busy_seconds=total.nanoseconds / 1e9,
            utilization=min(1.0, total.nanoseconds / 1e9 / window) if window > 0 else 0.0,
            nbytes=total.nbytes,
            flops=total.flops,
        )
        for lane, total in sums.items()
    ]


def _kinds(recording: Recording) -> list[KindUse]:
    sums: dict[tuple[str, str], _Sum] = {}
    for each in recording.slices:
        key = (each.task.verb, each.lane.name)
        if key not in sums:
            sums[key] = _Sum()
        sums[key].add(each)
    return [
        KindUse(
            kind=verb,
            lane=lane,
            tasks=total.tasks,
            seconds=total.nanoseconds / 1e9,
            nbytes=total.nbytes,
            flops=total.flops,
            gigabytes_per_second=total.nbytes / total.nanoseconds if total.nanoseconds else 0.0,
            gigaflops_per_second=total.flops / total.nanoseconds if total.nanoseconds else 0.0,
        )
        for (verb, lane), total in sorted(sums.items(), key=lambda item: -item[1].nanoseconds)
    ]


def _steps(recording: Recording) -> list[StepTime]:
    """Return the times of all steps; a step ends with its last `sample` task, although transfers may still run."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    sampled: dict[int, int] = {}
    for each in recording.slices:
        step = each.step
        first[step] = min(first.get(step, each.start), each.start)
        last[step] = max(last.get(step, 0), each.end)
        if each.task.verb == "sample":
            sampled[step] = max(sampled.get(step, 0), each.end)
    times: list[StepTime] = []
    begin = None if recording.trimmed else recording.start
    for step in sorted(first):
        start = first[step] if begin is None else begin
        begin = sampled.get(step, last[step])
        times.append(StepTime(step=step, start=start / 1e9, end=begin / 1e9))
    return times


def _peaks(recording: Recording) -> dict[str, int]:
    """Return the most bytes that any rank's plan reserves in each memory."""
    peaks: dict[str, int] = {}
    for sample in recording.memory:
        peaks[sample.memory] = max(peaks.get(sample.memory, 0), sample.reserved)
    return peaks

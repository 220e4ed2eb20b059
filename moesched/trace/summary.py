"""A recording in figures: lanes, kinds of task, steps. What reports, comparisons and benchmarks print."""

from __future__ import annotations

import msgspec

from moesched.trace.recording import LaneName, Recording, Slice


class LaneUse(msgspec.Struct, frozen=True, kw_only=True):
    """One lane after loading. `utilization` is its share of that time in which it was busy."""

    rank: int
    lane: str
    tasks: int
    busy_seconds: float
    utilization: float
    nbytes: float = msgspec.field(name="bytes")
    flops: float


class KindUse(msgspec.Struct, frozen=True, kw_only=True):
    """All tasks of one verb on one lane name, loading included; rates are while they ran."""

    kind: str
    lane: str
    tasks: int
    seconds: float
    nbytes: float = msgspec.field(name="bytes")
    flops: float
    gigabytes_per_second: float
    gigaflops_per_second: float


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """One step, from the end of the one before to its last sample, in seconds since the run's start.

    Step -1 is loading, 0 the prefill.
    """

    step: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording adds up to. `seconds` is from its first moment to its last task's end."""

    seconds: float
    tasks: int
    edges: int
    failed: int
    nbytes_moved: float = msgspec.field(name="bytes_moved")
    lanes: list[LaneUse]
    kinds: list[KindUse]
    steps: list[StepTime]
    peak_bytes: dict[str, int]


def summarize(recording: Recording) -> Summary:
    """Add a recording up."""
    steps = _steps(recording)
    return Summary(
        seconds=(recording.end - recording.start) / 1e9,
        tasks=len(recording.slices),
        edges=recording.edges,
        failed=sum(each.state == "failed" for each in recording.slices),
        nbytes_moved=sum(each.nbytes for each in recording.slices if each.type == "PageTransfer"),
        lanes=_lanes(recording, steps),
        kinds=_kinds(recording),
        steps=steps,
        peak_bytes=_peaks(recording),
    )


def lane_title(lane: LaneName | LaneUse, ranks: int) -> str:
    """A lane's name, with its rank where there are several."""
    name = lane.name if isinstance(lane, LaneName) else lane.lane
    return f"rank {lane.rank} {name}" if ranks > 1 else name


class _Sum:
    """Tasks, nanoseconds, bytes and FLOPs of some slices."""

    __slots__ = ("flops", "nanoseconds", "nbytes", "tasks")

    def __init__(self) -> None:
        self.tasks = 0
        self.nanoseconds = 0
        self.nbytes = 0.0
        self.flops = 0.0

    def add(self, each: Slice) -> None:
        self.tasks += 1
        self.nanoseconds += each.end - each.start
        self.nbytes += each.nbytes
        self.flops += each.flops


def _lanes(recording: Recording, steps: list[StepTime]) -> list[LaneUse]:
    """Loading counts for nothing here, unless there is nothing else."""
    only_loading = all(each.step < 0 for each in recording.slices)
    loaded = next((step.end for step in steps if step.step < 0 and not only_loading), recording.start / 1e9)
    window = recording.end / 1e9 - loaded
    sums = {lane: _Sum() for lane in recording.lanes}
    for each in recording.slices:
        if each.step >= 0 or only_loading:
            sums[each.lane].add(each)
    return [
        LaneUse(
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
        key = (each.verb, each.lane.name)
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
            gigabytes_per_second=total.nbytes / total.nanoseconds,
            gigaflops_per_second=total.flops / total.nanoseconds,
        )
        for (verb, lane), total in sorted(sums.items(), key=lambda item: -item[1].nanoseconds)
    ]


def _steps(recording: Recording) -> list[StepTime]:
    """A step ends with its last sample; transfers that it submitted for the next one may end later."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    sampled: dict[int, int] = {}
    for each in recording.slices:
        step = each.step
        first[step] = min(first.get(step, each.start), each.start)
        last[step] = max(last.get(step, 0), each.end)
        if each.verb == "sample":
            sampled[step] = max(sampled.get(step, 0), each.end)
    times: list[StepTime] = []
    begin = None if recording.trimmed else recording.start
    for step in sorted(first):
        start = first[step] if begin is None else begin
        begin = sampled.get(step, last[step])
        times.append(StepTime(step=step, start=start / 1e9, end=begin / 1e9))
    return times


def _peaks(recording: Recording) -> dict[str, int]:
    """The most bytes that any rank's plan took of each memory."""
    peaks: dict[str, int] = {}
    for sample in recording.memory:
        peaks[sample.memory] = max(peaks.get(sample.memory, 0), sample.reserved)
    return peaks

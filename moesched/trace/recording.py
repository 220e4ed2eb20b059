"""Recordings: the tasks of a run as plain values, their dependencies, and the contents of memories.

Recorders build them from tasks and the reader from a file; the writer and all analysis take them as input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from moesched.machines.demand import Demand
from moesched.steps.pool_counts import Counted
from moesched.tasks import Phase, phase_after


class LaneName(NamedTuple):
    """A lane of one rank."""

    rank: int
    name: str


class TaskInfo(msgspec.Struct, frozen=True, gc=False, rename={"nbytes": "bytes", "flops": "FLOP"}):
    """Description of a task; equal tasks of different steps may share one.

    Attributes:
        type: the class of the task, such as "PageTransfer".
        kind: the kind of operation, as cost tables name it.
        resource: the processor or link that it uses.
        layer, micro_batch, expert: -1 for none.
        pages: the number of weight pages that it moves.
        priority_class: its class on a ready-first lane; lower classes go first.
        pool: the pool that it brings pages to, with its memory, such as "experts in gpu".
        pool_slots: the number of pages that this pool has room for.
        rows: the rows (tokens) that it works on; 0 for transfers.
        page_names: the weight pages that it moves, in words.
    """

    label: str = ""
    verb: str = ""
    type: str = ""
    kind: str = ""
    resource: str = ""
    layer: int = -1
    micro_batch: int = -1
    expert: int = -1
    flops: float = 0.0
    nbytes: float = 0.0
    pages: int = 0
    priority_class: int = 0
    pool: str = ""
    rows: int = 0
    page_names: str = ""
    pool_slots: int = 0

    @property
    def work(self) -> WorkKey:
        """The key of the task's work."""
        return WorkKey(self.kind, self.resource, self.flops, self.nbytes)


class WorkKey(NamedTuple):
    """The fields that identify a work; works with equal keys have the same cost on a machine."""

    kind: str
    resource: str
    flops: float
    nbytes: float


class Slice(msgspec.Struct, gc=False):
    """A task that ran on a lane. Times are integer nanoseconds since the start of the run.

    Attributes:
        id: number of the task on its rank, in program order.
        step: number of its step: -1 for loading, 0 for the prefill, then 1, 2, ...
        state: "done" or "failed".
        ticket: number of the collective that it is a part of, -1 if none.
        line: the line of the policy that submitted it, as file:line.
        awaited_at: number of tasks submitted before the policy had to wait for this one; -1 if it never had to.
        dispatch: time from the lane's receipt of the task to its start, in which the thread of the lane wakes up.
        launching: time from the start of a stream's task until the host had launched its last kernel, in which the
            stream may have waited for the host.
        submit_delay: time in which the lane was idle until the policy submitted the task, counted from the end of the
            task that the policy awaited last, or from the previous such submission; -1 if the lane was not idle.
        experts: the experts that a router or a preview chose, with the number of rows of each; None for other tasks.
    """

    id: int
    lane: LaneName
    task: TaskInfo
    step: int
    start: int
    end: int
    state: str = "done"
    ticket: int = -1
    line: str = ""
    awaited_at: int = -1
    dispatch: int = 0
    launching: int = 0
    submit_delay: int = -1
    experts: dict[int, int] | None = None

    @property
    def phase(self) -> Phase | None:
        """The phase of the task's step; None for loading."""
        return phase_of(self.step)


def phase_of(step: int) -> Phase | None:
    """The phase of a recorded step, by its number; None for loading."""
    return None if step < 0 else phase_after(step)


class Cancelled(msgspec.Struct, frozen=True):
    """A task that the policy cancelled before it started.

    Attributes:
        id, lane, task, step, line: as in a `Slice`.
        time: nanoseconds from the start of the run to the cancellation.
    """

    id: int
    lane: LaneName
    task: TaskInfo
    step: int
    time: int
    line: str = ""


class MemorySample(NamedTuple):
    """A memory at one time: the bytes that the plan has reserved, and the bytes of these that hold pages."""

    rank: int
    memory: str
    time: int
    reserved: int
    pages: int


class PoolSample(NamedTuple):
    """The counts of one pool at one time, since the start of the run.

    They follow program order: the counts at the start of a task are those at the time the policy submitted it.
    """

    rank: int
    pool: str
    time: int
    counted: Counted


class RequestSpan(msgspec.Struct, frozen=True):
    """A request that joined and left a run; times are nanoseconds from the start of the run, -1 where there is none.

    Attributes:
        request: its number.
        arrived: its arrival.
        entered: when it got a place.
        first_token: when it had its first token.
        ended: when it had its last one, or left.
        tokens: the number of its tokens.
    """

    request: int
    arrived: int
    entered: int
    first_token: int
    ended: int
    tokens: int

    @property
    def parts(self) -> list[tuple[str, int, int]]:
        """Parts of the span as (name, start, end): its wait, its prompt and its tokens, without empty ones."""
        ends = [("waits", self.entered), ("prompt", self.first_token), ("tokens", self.ended)]
        parts, start = [], self.arrived
        for name, end in ends:
            end = self.ended if end < 0 else end
            if end > start:
                parts.append((name, start, end))
            start = end
        return parts


class Recording(msgspec.Struct):
    """The tasks of a run, in order of their ends.

    Attributes:
        lanes: all lanes in order of display, including idle ones.
        producers: for each slice, the indices of the slices of its rank that its task depends on; joins are expanded.
        trimmed: whether earlier steps were dropped.
        joins: number of joins that were expanded.
        in_order: lanes that run tasks in order of submission; all others run whichever task is ready.
        origin: time of the driver's clock at time 0, in nanoseconds.
        pools: the counts of pools over time.
        costs: the works' demands on the machine, where a cost model gave them.
        predictions: the seconds that the works of a measured run should take, each alone on the machine.
        cancelled: tasks that the policy cancelled, in order of time.
        requests: requests that joined and left, in order of arrival; empty for a batch.
    """

    lanes: list[LaneName]
    slices: list[Slice]
    producers: list[tuple[int, ...]]
    memory: list[MemorySample]
    trimmed: bool = False
    joins: int = 0
    in_order: frozenset[LaneName] = frozenset()
    origin: int = 0
    pools: list[PoolSample] = []
    costs: dict[WorkKey, Demand] = {}
    predictions: dict[WorkKey, float] = {}
    cancelled: list[Cancelled] = []
    requests: list[RequestSpan] = []

    def __repr__(self) -> str:
        return f"<Recording: {len(self.slices):,} tasks on {len(self.lanes)} lanes, {self.end / 1e9:.3g} s>"

    def part(self, kept: Sequence[int], **changed: object) -> Recording:
        """Return the recording of the slices at these indices, and of the dependencies between them.

        Args:
            changed: new values of other fields.
        """
        places = {index: place for place, index in enumerate(kept)}
        return msgspec.structs.replace(
            self,
            slices=[self.slices[index] for index in kept],
            producers=[
                tuple(places[each] for each in self.producers[index] if each in places) for index in kept
            ],
            **changed,
        )

    @property
    def titles(self) -> dict[LaneName, str]:
        """The names of its lanes, with their ranks if there are several."""
        several = len({lane.rank for lane in self.lanes}) > 1
        return {lane: f"rank {lane.rank} {lane.name}" if several else lane.name for lane in self.lanes}

    @property
    def durations(self) -> list[int]:
        """The nanoseconds of each slice."""
        return [each.end - each.start for each in self.slices]

    @property
    def edges(self) -> int:
        """Number of dependencies between slices."""
        return sum(map(len, self.producers))

    @property
    def start(self) -> int:
        """Start of the run in nanoseconds; for a trimmed recording, start of its first slice."""
        if not self.trimmed or not self.slices:
            return 0
        return min(each.start for each in self.slices)

    @property
    def end(self) -> int:
        """Latest end of a task, in nanoseconds."""
        return max((each.end for each in self.slices), default=0)


class Clock(msgspec.Struct, frozen=True, kw_only=True, rename={"ahead": "ahead_ns", "error": "error_ns"}):
    """Correction of one node's clock, in nanoseconds: its lead, which was subtracted, and the error bound."""

    ahead: int
    error: int


class Roof(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"flops": "flops_per_second", "bandwidth": "bytes_per_second"},
):
    """Limits of a processor: FLOP/s in the run's dtype, and bytes per second of the memory that it computes from."""

    flops: Annotated[float, Meta(gt=0)]
    bandwidth: Annotated[float, Meta(gt=0)]


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a recording.

    Attributes:
        driver: "virtual" predicts, "realtime" measures.
        plan: sizes that the policy chose, as JSON values.
        clocks: corrections of the clocks of several nodes, by rank.
        roofs: limits of the machine's processors, by name; empty where they are not known.
    """

    driver: Literal["virtual", "realtime"]
    policy: str = ""
    model: str = ""
    machine: str = ""
    plan: dict[str, Any] = {}
    clocks: dict[str, Clock] = {}
    roofs: dict[str, Roof] = {}

    @property
    def figures(self) -> Literal["predicted", "measured"]:
        """The word for the run's times: "predicted" on the virtual clock, "measured" in real time."""
        return "predicted" if self.driver == "virtual" else "measured"

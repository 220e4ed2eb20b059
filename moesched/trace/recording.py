"""Recordings: the tasks of a run as plain values, the dependencies between them, and the use of memories.

Recorders make recordings from tasks, the trace reader from files; the trace writer and all analysis take recordings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from moesched.steps.pool_counts import Counted
from moesched.tasks import Phase, phase_after
from moesched.work import Demand

WAIT = "wait"
"""The verb of a task that lasts until the next request arrives."""
MOST = 1e30
"""Limit of FLOPs, bytes and rates in a trace, so that sums and ratios of them are finite."""

Count = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""A number of pages, slots or rows; a report stores it in 32 bits."""


class LaneName(NamedTuple):
    """The name of a lane (queue of tasks), and the number of the rank that the lane belongs to."""

    rank: int
    name: str


class TaskInfo(msgspec.Struct, frozen=True, gc=False, rename={"nbytes": "bytes", "flops": "FLOP"}):
    """Description of a task, without its times; tasks that are alike may share one.

    Attributes:
        label: the task's name in viewers.
        type: the class of the task, such as "PageTransfer".
        kind: the kind of operation, as cost tables name it.
        resource: the processor or link that the task uses.
        layer, micro_batch, expert: -1 for none.
        flops, nbytes: FLOPs and bytes of the task.
        pages: the number of weight pages that the task moves.
        priority_class: the task's priority class. A lane that may run tasks in any order takes, of several ready tasks,
            one of the lowest class.
        pool: the pool that the task brings pages to, with its memory, such as "experts in gpu".
        pool_slots: the number of pages that this pool has room for.
        rows: the number of rows (tokens) that the task works on; 0 for transfers.
        page_names: the weight pages that the task moves, in words.
    """

    label: str = ""
    verb: str = ""
    type: str = ""
    kind: str = ""
    resource: str = ""
    layer: int = -1
    micro_batch: int = -1
    expert: int = -1
    flops: Annotated[float, Meta(ge=0, le=MOST)] = 0.0
    nbytes: Annotated[float, Meta(ge=0, le=MOST)] = 0.0
    pages: Count = 0
    priority_class: int = 0
    pool: str = ""
    rows: Count = 0
    page_names: str = ""
    pool_slots: Count = 0

    @property
    def work(self) -> WorkKey:
        """The fields of the task on which its cost depends: tasks with equal fields have equal costs on a machine."""
        return WorkKey(self.kind, self.resource, self.flops, self.nbytes)


class WorkKey(NamedTuple):
    """The fields of a task on which its cost on a machine depends; tasks with equal keys have equal costs."""

    kind: str
    resource: str
    flops: float
    nbytes: float


class Slice(msgspec.Struct, gc=False):
    """A task that ran on a lane; `start` and `end` are integer nanoseconds since the start of the run.

    Attributes:
        id: number of the task on its rank, in program order.
        task: description of the task.
        step: number of the task's step: -1 for loading, 0 for the prefill, then 1, 2, ...
        state: "done" or "failed".
        ticket: number of the collective that the task is a part of, -1 if none.
        line: the line of the policy that submitted the task, as file:line.
        awaited_at: number of tasks submitted before the policy had to wait for this one; -1 if it never had to.
        dispatch: nanoseconds from the lane's receipt of the task to its start, in which the lane's thread wakes up; 0
            for a task on a stream.
        launching: for a task on a stream, nanoseconds from its start until the host had launched the task's last
            kernel; the stream may have waited for the host in this time.
        submit_delay: nanoseconds that the policy took to submit a task that could start as soon as it was submitted; -1
            for tasks that then had to wait for other tasks or for their lane. The time counts from the end of the task
            that the policy awaited last, or from the policy's previous submission of such a task if that was later.
        experts: numbers of rows by expert, for the experts that a router or a preview chose; None for other tasks.
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
        """The phase of the task's step, "prefill" or "decode"; None for loading."""
        return phase_of(self.step)


def phase_of(step: int) -> Phase | None:
    """Return the phase of a step, "prefill" or "decode", by the step's number; None for loading (-1)."""
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
    """The use of a memory at one time.

    Attributes:
        time: nanoseconds since the start of the run.
        reserved: bytes that the plan has reserved.
        pages: reserved bytes that hold pages of weights.
    """

    rank: int
    memory: str
    time: int
    reserved: int
    pages: int


class PoolSample(NamedTuple):
    """The counts of one pool at one time, added up since the start of the run.

    A sample at the start of a task has the counts from when the policy submitted that task. The last sample is at the
    end of the recording.

    Attributes:
        pool: the pool's name with its memory, such as "experts in gpu".
        time: nanoseconds since the start of the run.
    """

    rank: int
    pool: str
    time: int
    counted: Counted


class RequestSpan(msgspec.Struct, frozen=True):
    """A request that joined and left a run; times are nanoseconds since the run's start, -1 for what never happened.

    Attributes:
        request: number of the request.
        arrived: time of its arrival.
        entered: time at which the request got a place in a micro-batch.
        first_token: time at which the request had its first token.
        ended: time at which the request had its last token, or left.
        tokens: number of tokens that were generated for the request.
    """

    request: int
    arrived: int
    entered: int
    first_token: int
    ended: int
    tokens: int

    @property
    def parts(self) -> list[tuple[str, int, int]]:
        """The request's wait, prompt and tokens as (name, start, end) in nanoseconds, without empty parts."""
        ends = [("waits", self.entered), ("prompt", self.first_token), ("tokens", self.ended)]
        parts, start = [], self.arrived
        for name, end in ends:
            end = self.ended if end < 0 else end
            if end > start:
                parts.append((name, start, end))
            start = end
        return parts


class Recording(msgspec.Struct):
    """The tasks of a run, and all that is known about them.

    Attributes:
        lanes: all lanes in order of display, including idle ones.
        slices: the tasks that ran, in order of their ends.
        producers: for each slice, the indices of the slices that it depends on, all of the same rank; a join (a graph
            node without work) is replaced by the slices before it.
        memory: samples of the memories' use.
        trimmed: whether earlier steps were dropped.
        joins: number of joins that were replaced.
        in_order: lanes that run tasks in order of submission; all others run whichever task is ready.
        origin: the time on the driver's clock that is time 0 of the recording, in nanoseconds.
        pools: samples of the pools' counts.
        costs: the time and resources that tasks need, by `WorkKey`, where a cost model gave them.
        predictions: for a measured run, the predicted seconds of tasks alone on the machine, by `WorkKey`.
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
        """Return a recording with only some of the tasks that ran, and the dependencies between them.

        Args:
            kept: the indices of these tasks in `slices`, in the order that they will have.
            changed: new values of other fields, by name.
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
        """The name to show for each lane; it includes the rank if the recording has several ranks."""
        several = len({lane.rank for lane in self.lanes}) > 1
        return {lane: f"rank {lane.rank} {lane.name}" if several else lane.name for lane in self.lanes}

    @property
    def durations(self) -> list[int]:
        """The duration of each task in `slices`, in nanoseconds."""
        return [each.end - each.start for each in self.slices]

    @property
    def edges(self) -> int:
        """Number of dependencies between the tasks that ran."""
        return sum(map(len, self.producers))

    @property
    def start(self) -> int:
        """The start of the first task in a trimmed recording, in nanoseconds; otherwise 0, the start of the run."""
        if not self.trimmed or not self.slices:
            return 0
        return min(each.start for each in self.slices)

    @property
    def end(self) -> int:
        """The latest end of a task, in nanoseconds since the start of the run."""
        return max((each.end for each in self.slices), default=0)


class Clock(msgspec.Struct, frozen=True, kw_only=True, rename={"ahead": "ahead_ns", "error": "error_ns"}):
    """The correction of one node's clock.

    Attributes:
        ahead: nanoseconds by which the node's clock was ahead of the common clock; they were subtracted from the node's
            times.
        error: bound of the correction's error, in nanoseconds.
    """

    ahead: int
    error: int


class Roof(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={"flops": "flops_per_second", "bandwidth": "bytes_per_second"},
):
    """Limits of a processor's speed.

    Attributes:
        flops: FLOP/s in the dtype of the run.
        bandwidth: bytes per second of the memory from which the processor reads.
    """

    flops: Annotated[float, Meta(ge=1, le=MOST)]
    bandwidth: Annotated[float, Meta(ge=1, le=MOST)]


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a recording.

    Attributes:
        driver: "virtual" for a predicted run, "realtime" for a measured one.
        policy, model, machine: names.
        plan: sizes that the policy chose, as JSON values by name.
        clocks: corrections of the clocks of several nodes, by rank.
        roofs: limits of the machine's processors, by name; empty where they are not known.
        costs_measured: for a predicted run, whether `moesched calibrate` measured the costs behind the prediction.
        tokens_per_second: all generated tokens, divided by the time from the end of loading to the last token; it is
            for the whole run, even if the recording lacks earlier steps. 0 if it is not known.
    """

    driver: Literal["virtual", "realtime"]
    policy: str = ""
    model: str = ""
    machine: str = ""
    plan: dict[str, Any] = {}
    clocks: dict[str, Clock] = {}
    roofs: dict[str, Roof] = {}
    costs_measured: bool = False
    tokens_per_second: Annotated[float, Meta(ge=0, le=MOST)] = 0.0

    @property
    def figures(self) -> Literal["predicted", "measured"]:
        """The word for the kind of the run's times: "predicted" on the virtual clock, "measured" in real time."""
        return "predicted" if self.driver == "virtual" else "measured"

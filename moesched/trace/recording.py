"""A recording: the tasks that ran as plain values, who waited for whom, and what memories held.

Recorders make it from tasks, the reader makes it from a file; the writer and all analysis start from it.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec


class LaneName(NamedTuple):
    """A lane of one rank."""

    rank: int
    name: str


class Slice(msgspec.Struct, gc=False):
    """One task that ran. Times are integer nanoseconds since the run's start; -1 is "none" for what it is about.

    Attributes:
        id: the task's number on its rank, in program order.
        type: the kind of task, such as "PageTransfer".
        kind: the kind of operation, as cost tables name it.
        pages: how many weight pages it moved.
        ticket: which collective it is a part of, -1 if none.
        state: "done" or "failed".
        line: the policy line that submitted it, as file:line.
        link_class: the class of a transfer on a ready-first lane; a lower one goes first.
        awaited_at: how many tasks had been submitted when the policy had to wait for it; -1 where it never had to.
        dispatch: how long its lane had it before it started: its thread had to hear of it and wake up.
        thought: how long the policy took to submit it while its lane lay idle for it: since the end of what it awaited
            last, or since the task before this one that has such a time; -1 where nothing waited for the policy.
    """

    id: int
    lane: LaneName
    label: str
    verb: str
    type: str
    kind: str
    resource: str
    step: int
    layer: int
    micro_batch: int
    expert: int
    start: int
    end: int
    flops: float
    nbytes: float
    pages: int = 0
    ticket: int = -1
    state: str = "done"
    line: str = ""
    link_class: int = 0
    awaited_at: int = -1
    dispatch: int = 0
    thought: int = -1


class MemorySample(NamedTuple):
    """One memory at one time: bytes that the plan took of it, and bytes of those in which pages lie."""

    rank: int
    memory: str
    time: int
    reserved: int
    pages: int


class Recording(msgspec.Struct):
    """What happened, in order of the tasks' ends.

    Attributes:
        lanes: every lane in the order of display, idle ones too.
        producers: for each slice, the indices of those slices that its task waited for; joins are expanded.
        trimmed: whether earlier steps ran that are not in it.
        joins: how many joins the edges were expanded through.
        in_order: the lanes that issue their tasks as submitted; the others take whichever is ready.
        origin: what the driver's clock said at time 0; nanoseconds.
    """

    lanes: list[LaneName]
    slices: list[Slice]
    producers: list[tuple[int, ...]]
    memory: list[MemorySample]
    trimmed: bool = False
    joins: int = 0
    in_order: frozenset[LaneName] = frozenset()
    origin: int = 0

    @property
    def edges(self) -> int:
        """How many pairs of slices are joined by an edge."""
        return sum(map(len, self.producers))

    @property
    def start(self) -> int:
        """When it begins: the run's start, or the first start that was kept."""
        if not self.trimmed or not self.slices:
            return 0
        return min(each.start for each in self.slices)

    @property
    def end(self) -> int:
        """The last end of a task."""
        return max((each.end for each in self.slices), default=0)


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """How one node's clock was brought into line; nanoseconds."""

    ahead: int
    error: int


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What a recording is of.

    Attributes:
        driver: "virtual" predicts, "realtime" measures.
        plan: the sizes that the policy chose, as JSON can hold them.
        clocks: of several nodes, by rank: by how much its clock was ahead of the one that the times are by, and how
            wrong that may be; it was taken off.
    """

    driver: Literal["virtual", "realtime"]
    policy: str = ""
    model: str = ""
    machine: str = ""
    plan: dict[str, Any] = {}
    clocks: dict[str, Clock] = {}

    @property
    def figures(self) -> Literal["predicted", "measured"]:
        """Whether the times were predicted or measured."""
        return "predicted" if self.driver == "virtual" else "measured"

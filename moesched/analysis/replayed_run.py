"""Replays a recorded run on the virtual clock, with recorded durations and new start times.

A replay takes three things from the recording: the tasks in program order, with their durations, dependencies and
priority classes; the lanes, which run their tasks in order or as they become ready; and the tasks that the policy
awaited before it submitted more. Start times are computed anew, and by default no time passes between a task and the
tasks that wait for it. If a replay is shorter than the recorded run, the difference is time that passed between tasks.

Transfers of the idle class run only when their lane has nothing else to do. In a replay, a lane is free at other times
than in the recorded run; one reason is that a recording has no cancelled transfers. An idle-class transfer could then
run after tasks that it preceded in the recorded run. To prevent this, a task waits for the idle-class transfers that
were submitted before it and started before it on its lane.

With `handovers`, the mean times between tasks are included (see `moesched.analysis.handovers`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from moesched.analysis.handovers import Handover, awaits_in_order, mean_handovers
from moesched.drivers.virtual import VirtualDriver
from moesched.engine import Engine
from moesched.errors import BadInput
from moesched.tasks import IDLE, Block, Collective, Kernel, Lane, Task
from moesched.trace.recording import LaneName, Recording, Slice, TaskInfo
from moesched.work import Demand, Work


def replay_recording(
    recording: Recording,
    durations: Sequence[int] | None = None,
    *,
    works: Sequence[Work] | None = None,
    handovers: bool = False,
) -> Recording:
    """Replay a recording with the virtual driver; the result is a recording without memory samples.

    Args:
        durations: nanoseconds of each task; by default as recorded.
        works: instead of durations, each task's `Work`: its time when it runs alone, and its shares of resources.
        handovers: whether tasks start later by the mean times that the run took, for tasks of their kind, to submit
            them and to wake their lanes (see `moesched.analysis.handovers`).

    Raises:
        BadInput: the recording cannot be of a run, since a task depends on one that was submitted after it, or the
            policy awaited a task before it submitted that task.
    """
    slices = recording.slices
    if durations is None:
        durations = recording.durations
    ranks = range(1 + max((lane.rank for lane in recording.lanes), default=0))
    lanes = {
        name: Lane(name.name, "in_order" if name in recording.in_order else "ready_first")
        for name in recording.lanes
    }
    policy_lanes = [Lane("policy") for _ in ranks]
    engines = [
        Engine([*(lane for name, lane in lanes.items() if name.rank == rank), policy_lanes[rank]])
        for rank in ranks
    ]
    means = mean_handovers(recording) if handovers else [Handover()] * len(slices)
    sharing = works is not None
    if works is None:
        works = [
            timed_work(each.task, max(1, nanoseconds), handover.dispatch)
            for each, nanoseconds, handover in zip(slices, durations, means, strict=True)
        ]
        sharing = handovers
    replay = _Replay(recording, works, lanes, policy_lanes, means)
    driver = VirtualDriver(engines, _AsRecorded(), sharing=sharing)
    driver.run(*(replay.submit(rank, engine) for rank, engine in enumerate(engines)))
    return replay.recording()


def without_loading(recording: Recording) -> Recording:
    """Remove from a recording the initial loading of weights, and tasks that ended after the last token was sampled.

    Loaded weights are then present from the start, so that no task waits for them. A recording of loading alone is
    returned unchanged.
    """
    ends = [each.end for each in recording.slices]
    until = max((each.end for each in recording.slices if each.task.verb == "sample"), default=recording.end)
    before = recording.slices[: bisect_right(ends, until)]
    kept = [index for index, each in enumerate(before) if each.step >= 0]
    return recording.part(kept, trimmed=True) if kept else recording


_ALONE = Demand(0.0, ())


class _AsRecorded:
    """A cost model that is never called, since every task of a replay states its own nanoseconds."""

    def work(self, work: Work) -> Demand:
        raise BadInput(f"no duration was recorded of {work.kind}: record the run again")


class _Replay:
    """A policy that submits the tasks of a recording again, to replay them.

    Args:
        policy_lanes: for each rank, a lane for the policy's delays. Each delay before a submission is replayed as an
            extra task on this lane.
    """

    def __init__(
        self,
        recording: Recording,
        works: Sequence[Work],
        lanes: dict[LaneName, Lane],
        policy_lanes: Sequence[Lane],
        handovers: Sequence[Handover],
    ) -> None:
        self._recording = recording
        self._works = works
        self._lanes = lanes
        self._policy_lanes = policy_lanes
        self._handovers = handovers
        self._idle_before = _idle_before(recording.slices)
        self._results = [Block("result") for _ in recording.slices]
        self._tasks: list[Task | None] = [None] * len(recording.slices)

    async def submit(self, rank: int, engine: Engine) -> None:
        """Submit a rank's tasks in program order, and await the tasks that the rank's recorded policy awaited."""
        slices = self._recording.slices
        mine = sorted((each.id, index) for index, each in enumerate(slices) if each.lane.rank == rank)
        awaits = awaits_in_order(self._recording, rank)[::-1]
        for number, index in mine:
            while awaits and awaits[-1][0] <= number:
                await self._submitted(awaits.pop()[1])
            delay = self._handovers[index].submit_delay
            if delay > 0:
                await engine.submit(_delay(self._policy_lanes[rank], delay))
            self._submit(engine, index)

    def recording(self) -> Recording:
        """Return the recording of the replay, with tasks in order of their ends."""
        tasks = [self._submitted(index) for index in range(len(self._tasks))]
        order = sorted(range(len(tasks)), key=lambda index: (tasks[index].end, index))
        places = {index: place for place, index in enumerate(order)}
        before = self._recording
        return msgspec.structs.replace(
            before,
            slices=[
                msgspec.structs.replace(before.slices[index], start=tasks[index].start, end=tasks[index].end)
                for index in order
            ],
            producers=[tuple(map(places.__getitem__, before.producers[index])) for index in order],
            memory=[],
            trimmed=False,
        )

    def _submit(self, engine: Engine, index: int) -> None:
        each = self._recording.slices[index]
        work = self._works[index]
        before = (*self._recording.producers[index], *self._idle_before[index])
        reads = [self._results[producer] for producer in before]
        if not all(map(self._tasks.__getitem__, before)):
            raise BadInput(
                f"{each.task.label}, task {each.id}, waits for a task that was submitted later: record the run again"
            )
        writes = (self._results[index],)
        lane = self._lanes[each.lane]
        if each.ticket >= 0:
            part = Collective(lane, work, each.task.verb, signature=each.task.verb)
            self._tasks[index] = engine.collective(part, reads, writes)
        else:
            task = Kernel(lane, work, each.task.verb)
            # by position, as `Engine.submit` takes them fastest
            self._tasks[index] = engine.submit(task, reads, writes, (), each.task.priority_class)

    def _submitted(self, index: int) -> Task:
        task = self._tasks[index]
        if task is None:
            each = self._recording.slices[index]
            raise BadInput(
                f"{each.task.label}, task {each.id}, was awaited before it was submitted: record the run again"
            )
        return task


def _idle_before(slices: Sequence[Slice]) -> list[tuple[int, ...]]:
    """Return for each task, in a tuple, the index of the last idle-class transfer that started before it on its lane.

    Only transfers submitted before the task count; the tuple is empty if there is none.
    """
    found: list[tuple[int, ...]] = [()] * len(slices)
    idle: dict[LaneName, list[int]] = {}
    for index in sorted(range(len(slices)), key=lambda index: slices[index].start):
        each = slices[index]
        earlier = idle.setdefault(each.lane, [])
        last = next((before for before in reversed(earlier) if slices[before].id < each.id), None)
        if last is not None:
            found[index] = (last,)
        if each.task.priority_class == IDLE:
            earlier.append(index)
    return found


def timed_work(task: TaskInfo, nanoseconds: int, lead: int = 0) -> Work:
    """Return the `Work` of a task with a fixed duration, which other tasks do not slow down.

    Args:
        lead: nanoseconds for which the task holds its lane before it starts; they are added to `nanoseconds`.
    """
    return _timed(task.kind, task.resource, nanoseconds, lead)


def _timed(kind: str, resource: str, nanoseconds: int, lead: int = 0) -> Work:
    return Work(kind, resource, nanoseconds=lead + nanoseconds, lead=lead, demand=_ALONE)


def _delay(lane: Lane, nanoseconds: int) -> Task:
    return Kernel(lane, _timed("think", "", nanoseconds), "think")

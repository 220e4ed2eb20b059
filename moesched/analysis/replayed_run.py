"""A recorded run once more: its graph with its durations on the virtual clock, which decides anew when tasks start.

What is taken from the recording is what a run is made of: the tasks in program order and how long each took, who waits
for whom, the lanes with their discipline and the transfers' classes, and at which handles the policy waited before it
submitted more. Start times are not taken. So the time of such a replay is what graph and durations explain of the
recorded time; the rest passed between tasks.

What nobody needed yet ran where its lane had nothing else to do, and what was given up before that is not in the
recording. So what came after it on its lane comes after it in the replay: it would else find another gap, or none.

What passes between tasks was measured, too, and with `handovers` counts with its means (`moesched.analysis.handovers`).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moesched.analysis.handovers import Handover, awaits_in_order, mean_handovers
from moesched.drivers.virtual import VirtualDriver
from moesched.engine import Engine
from moesched.errors import BadInput
from moesched.seams import Demand
from moesched.tasks import IDLE, Block, Collective, Kernel, Lane, Task, Work
from moesched.trace.recording import LaneName, Recording, Slice


def replay_recording(
    recording: Recording, durations: Sequence[int] | None = None, *, handovers: bool = False
) -> Recording:
    """The run that the virtual driver makes of a recording's graph; it has no memory samples.

    Args:
        durations: nanoseconds of each slice; by default as recorded.
        handovers: whether what lies between tasks takes the mean time of its kind, not none.

    Raises:
        BadInput: an edge leads to a task that was submitted later, as no recording of a run has it.
    """
    slices = recording.slices
    if durations is None:
        durations = [each.end - each.start for each in slices]
    ranks = range(1 + max((lane.rank for lane in recording.lanes), default=0))
    lanes = {
        name: Lane(name.name, "in_order" if name in recording.in_order else "ready_first")
        for name in recording.lanes
    }
    minds = [Lane("policy") for _ in ranks]
    engines = [
        Engine([*(lane for name, lane in lanes.items() if name.rank == rank), minds[rank]]) for rank in ranks
    ]
    replay = _Replay(recording, durations, lanes, minds, handovers)
    driver = VirtualDriver(engines, _AsRecorded(), sharing=handovers)
    driver.run(*(replay.submit(rank, engine) for rank, engine in enumerate(engines)))
    return replay.recording()


def without_loading(recording: Recording) -> Recording:
    """What a recording shows of the steps, without the loading of weights before them.

    What loading left behind is there from the start, so that no task waits for it. A recording of nothing but loading
    stays as it is.
    """
    kept = [index for index, each in enumerate(recording.slices) if each.step >= 0]
    if not kept:
        return recording
    places = {index: place for place, index in enumerate(kept)}
    producers = [
        tuple(places[each] for each in recording.producers[index] if each in places) for index in kept
    ]
    return msgspec.structs.replace(
        recording, slices=[recording.slices[index] for index in kept], producers=producers, trimmed=True
    )


_ALONE = Demand(0.0, ())


class _AsRecorded:
    """A cost model that is never asked, since all works bring their nanoseconds with them, and share nothing."""

    def work(self, work: Work) -> Demand:
        raise BadInput(f"no duration was recorded of {work.kind}: record the run again")


class _Replay:
    """The tasks of a recording, submitted again.

    minds: where each rank's policy thinks, if handovers take time.
    """

    def __init__(
        self,
        recording: Recording,
        durations: Sequence[int],
        lanes: dict[LaneName, Lane],
        minds: Sequence[Lane],
        handovers: bool,
    ) -> None:
        self._recording = recording
        self._durations = durations
        self._lanes = lanes
        self._minds = minds
        self._handovers = mean_handovers(recording) if handovers else [Handover()] * len(recording.slices)
        self._idle_before = _idle_before(recording.slices)
        self._results = [Block("result") for _ in recording.slices]
        self._tasks: list[Task | None] = [None] * len(recording.slices)

    async def submit(self, rank: int, engine: Engine) -> None:
        """A rank's tasks in program order, waiting where its policy had to."""
        slices = self._recording.slices
        mine = sorted((each.id, index) for index, each in enumerate(slices) if each.lane.rank == rank)
        awaits = awaits_in_order(self._recording, rank)[::-1]
        for number, index in mine:
            while awaits and awaits[-1][0] <= number:
                await self._submitted(awaits.pop()[1])
            if self._handovers[index].thought > 0:
                await engine.submit(_thinking(self._minds[rank], self._handovers[index].thought))
            self._submit(engine, index)

    def recording(self) -> Recording:
        """What the replay came to, in order of the tasks' ends."""
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
            producers=[tuple(places[each] for each in before.producers[index]) for index in order],
            memory=[],
            trimmed=False,
        )

    def _submit(self, engine: Engine, index: int) -> None:
        each = self._recording.slices[index]
        nanoseconds = max(1, self._durations[index])
        work = _work(each.kind, each.resource, nanoseconds, self._handovers[index].dispatch)
        before = (*self._recording.producers[index], *self._idle_before[index])
        reads = [self._results[producer] for producer in before]
        if any(block.writer is None for block in reads):
            raise BadInput(
                f"{each.label}, task {each.id}, waits for a task that came after it: record the run again"
            )
        writes = (self._results[index],)
        lane = self._lanes[each.lane]
        if each.ticket >= 0:
            part = Collective(lane, work, each.verb, signature=each.verb)
            self._tasks[index] = engine.collective(part, reads, writes)
        else:
            task = Kernel(lane, work, each.verb)
            self._tasks[index] = engine.submit(task, reads, writes, transfer_class=each.link_class)

    def _submitted(self, index: int) -> Task:
        task = self._tasks[index]
        assert task is not None
        return task


def _idle_before(slices: Sequence[Slice]) -> list[tuple[int, ...]]:
    """By slice, the last one on its lane that nobody needed, of those that were submitted and began before it."""
    found: list[tuple[int, ...]] = [()] * len(slices)
    idle: dict[LaneName, list[int]] = {}
    for index in sorted(range(len(slices)), key=lambda index: slices[index].start):
        each = slices[index]
        earlier = idle.setdefault(each.lane, [])
        last = next((before for before in reversed(earlier) if slices[before].id < each.id), None)
        if last is not None:
            found[index] = (last,)
        if each.link_class == IDLE:
            earlier.append(index)
    return found


def _work(kind: str, resource: str, nanoseconds: int, lead: int = 0) -> Work:
    """A work that takes so long once it has started, and so long before that."""
    return Work(kind, resource, nanoseconds=lead + nanoseconds, lead=lead, demand=_ALONE)


def _thinking(mind: Lane, nanoseconds: int) -> Task:
    return Kernel(mind, _work("think", "", nanoseconds), "think")

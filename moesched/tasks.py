"""The vocabulary of the engine: blocks of data, lanes, typed tasks, their states and the moves between states.

A task has two halves. The first is set by the policy: a lane, a kind of work, and the layer, micro-batch and expert
that it belongs to. The second is set by the engine: state, edges, times. Tasks are structs that the garbage collector
does not track, since a schedule makes hundreds of thousands of them. That is safe, because a task refers to later tasks
only, and forgets them when it settles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from heapq import heapify, heappop
from types import CodeType, MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec

from moesched.errors import PolicyError, TaskCancelled, TaskFailed
from moesched.work import Work

S = TypeVar("S")

WAITING, READY, RUNNING, ISSUED, DONE, FAILED, CANCELLED = range(7)
STATE_NAMES = ("waiting", "ready", "running", "issued", "done", "failed", "cancelled")

MOVES: Mapping[int, tuple[int, ...]] = {
    WAITING: (READY, RUNNING, CANCELLED),
    READY: (RUNNING, CANCELLED),
    RUNNING: (ISSUED, DONE, FAILED),
    ISSUED: (DONE, FAILED, CANCELLED),
}
"""The states that a task may move to in one call of the engine, by its state before.

A task that becomes ready takes its lane in the same call if the lane is free. Of tasks that have begun, only those on a
stream can be cancelled, when a task before them on the device failed.
"""

JOIN_MOVES: Mapping[int, tuple[int, ...]] = {WAITING: (DONE, CANCELLED)}
"""The states that a join may move to, by its state before; a join takes no lane."""

Discipline = Literal["in_order", "ready_first"]

Phase = Literal["prefill", "decode"]
"""The two kinds of work on a sequence: on its prompt, and on one token after the other."""

URGENT, DEMAND, PREFETCH, IDLE = range(-1, 3)
"""Priority classes of tasks on a ready-first lane: lower classes go first; within a class, program order decides."""

CLASS_SHIFT = 48
"""A task's key holds its class above this bit, and its id below."""


class Block:
    """A named piece of data in one memory, to which dependencies attach.

    Attributes:
        name: the name in messages.
        nbytes: the block's size in bytes; 0 if not known.
        memory: the memory's name; empty if not known.
        writer: the last task submitted that writes the block; None for none. The engine infers edges from it.
        readers: the tasks that read the block after `writer`; those that `forget_readers` dropped are left out.
    """

    __slots__ = ("memory", "name", "nbytes", "readers", "writer")

    def __init__(self, name: str, nbytes: int = 0, memory: str = "") -> None:
        self.name = name
        self.nbytes = nbytes
        self.memory = memory
        self.writer: Task | None = None
        self.readers: list[Task] = []

    def forget_readers(self, before: int) -> None:
        """Drop ended readers of steps before the step `before`, so that the list stays short in a long run.

        Readers of `before` and later steps stay even if they have ended: whether a trace shows an edge must not depend
        on timing.
        """
        self.readers = [task for task in self.readers if task.step >= before or task.state < DONE]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} in {self.memory or 'no memory'}: {self.nbytes} bytes>"


class Lane:
    """One serial resource: a compute stream, a copy direction, a CPU pool, a disk queue, a network card.

    Args:
        discipline: the order of tasks. "ready_first" takes, of the ready tasks, the one of the lowest priority class,
            and of several in that class the earliest. "in_order" takes tasks in the order of submission.
        domain: name of the device, if the lane is one of its streams; None for other lanes. The device itself enforces
            edges between its streams, so the engine does not wait for tasks on the same device to end: it hands a task
            over as soon as it has handed over those that the task depends on.
        depth: while fewer tasks than this are in flight, any ready task may be handed to the stream. A task is in
            flight from the time that it is handed over until it ends.
        depth_in_order: the largest number of tasks in flight, at least `depth`. While `depth` or more are in flight,
            only the next task in program order (the order of submission) is handed over. Any other task could delay an
            earlier one that becomes ready meanwhile.

    Attributes:
        in_order: whether the discipline is "in_order".
        in_flight: number of tasks that are handed to the stream and have not ended.
        busy: nanoseconds for which tasks have run on the lane so far.
        running: the task that holds the lane; None while the lane is idle.
        over: whether the lane's run is over; the driver of a later run refuses to await tasks of this lane.
        simple: whether the lane carries no collectives, and its engine was not halted. Then nothing but edges and the
            lane itself decides when a task starts.
        unstarted: the tasks of a stream in program order, from the first that has not started.
    """

    __slots__ = (
        "busy",
        "depth",
        "depth_in_order",
        "domain",
        "heap",
        "in_flight",
        "in_order",
        "index",
        "name",
        "over",
        "queue",
        "running",
        "simple",
        "unstarted",
    )

    def __init__(
        self,
        name: str,
        discipline: Discipline = "ready_first",
        *,
        domain: str | None = None,
        depth: int = 2,
        depth_in_order: int = 0,
    ) -> None:
        self.name = name
        self.in_order = discipline == "in_order"
        self.over = False
        self.simple = True
        self.domain = domain
        self.depth = depth
        self.depth_in_order = max(depth, depth_in_order)
        self.in_flight = 0
        self.index = -1
        self.busy = 0
        self.running: Task | None = None
        self.heap: list[tuple[int, Task]] = []
        self.queue: deque[Task] = deque()
        self.unstarted: deque[Task] = deque()

    def next_task(self) -> Task | None:
        """Remove from the lane the task that is to run next, and return it; return None if no task may start."""
        unstarted = self.unstarted
        while unstarted and unstarted[0].state >= RUNNING:
            unstarted.popleft()
        if self.in_flight >= self.depth and not self._may_run_ahead():
            return None
        if not self.in_order:
            return heappop(self.heap)[1] if self.heap else None
        queue = self.queue
        while queue and queue[0].state >= DONE:
            queue.popleft()
        return queue.popleft() if queue and queue[0].state == READY else None

    def _may_run_ahead(self) -> bool:
        """Test whether a stream that has `depth` tasks may take one more, which must be the next in program order."""
        if self.in_flight >= self.depth_in_order:
            return False
        return self.in_order or (bool(self.heap) and self.heap[0][1] is self.unstarted[0])

    def remove(self, task: Task) -> None:
        """Remove from the lane a ready task that is not to run; an in-order lane later skips the settled task."""
        if not self.in_order:
            self.heap.remove((task.key, task))
            heapify(self.heap)

    def advance(self, task: Task, key: int) -> None:
        """Give a ready task the smaller key `key`, so that it runs earlier; no effect on an in-order lane."""
        if not self.in_order:
            self.heap[self.heap.index((task.key, task))] = (key, task)
            heapify(self.heap)

    def remove_all(self) -> list[Task]:
        """Take all ready tasks except collectives, on which other ranks rely, off the lane, and return them.

        An in-order lane still has the returned tasks in its queue, and skips them there once they are settled.
        """
        removed = [task for _, task in self.heap if type(task) is not Collective]
        removed += [task for task in self.queue if task.state == READY and type(task) is not Collective]
        self.heap = [(key, task) for key, task in self.heap if type(task) is Collective]
        heapify(self.heap)
        return removed

    def __repr__(self) -> str:
        return f"<Lane {self.name}>"


class RowRange(NamedTuple):
    """A range of an expert's rows in a micro-batch, in the order of their tokens: from `start` to `stop` - 1."""

    micro_batch: int
    start: int
    stop: int


class DeviceEdges:
    """Dependencies of a stream's task that the device enforces instead of the engine.

    Attributes:
        before: tasks on other streams of the device that the device runs before this task.
        followers: tasks that the engine may start before this task ends, since the device makes them wait for it.
    """

    __slots__ = ("before", "followers")

    def __init__(self) -> None:
        self.before: list[Task] = []
        self.followers: list[Task] = []


def _set_plainly(cls: type[S]) -> type[S]:
    """Decorate a struct so that it sets attributes as plain objects do, which takes a quarter of msgspec's time.

    What msgspec does in addition is for the garbage collector, which does not track tasks.
    """
    cls.__setattr__ = object.__setattr__  # type: ignore[method-assign]
    cls.__delattr__ = object.__delattr__  # type: ignore[method-assign]
    return cls


@_set_plainly
class Task(msgspec.Struct, eq=False, gc=False):
    """One operation on a lane. A submitted task is its own handle: `await task` gives its value.

    Attributes:
        lane: the lane that runs it.
        work: the task's demands on the machine.
        verb: the kind of operation, such as "fetch" or "run_expert", that the task carries out, whole or in part.
        layer, micro_batch, expert: numbers of the layer, micro-batch and expert of the task; -1 for none.
        operands: the operation's arguments, for the device.
        step: number of the task's step; -1 for a task of no step.
        generated: number of tokens that each sequence of the task's micro-batch generated before the step: 0 for
            prompts, -1 for a task of no step. The minimum if sequences differ; for a fetch, the minimum of the step.
        id: the task's number in program order.
        key: sort key of ready tasks; of these, the lane takes the one with the smallest key.
        state: one of `WAITING`, `READY`, `RUNNING`, `ISSUED`, `DONE`, `FAILED`, `CANCELLED`.
        waits: number of the task's dependencies that are not met yet.
        start, end: the driver's clock, in nanoseconds, when the task started and ended; -1 before that.
        deps: ids of the tasks that this task waits for.
        inputs: number of tasks whose results the task needs; their ids come first in `deps`.
        followers: the tasks that wait for this task; None once it is done, failed or cancelled.
        device_edges: dependencies that the device's streams enforce, not the engine; None for none.
        waiter: the policy's coroutine that awaits the task; None for none.
        cause: the error by which the task failed or was cancelled; None for none.
        code, instruction: code object and byte offset of the policy's line that submitted the task; None without one.
        taken: on real hardware, nanoseconds at which the lane took the task; the time from then to `start` is the time
            that the lane's thread needs to wake. -1 if not recorded.
        launched: on a stream, nanoseconds at which the host had launched the last of the task's kernels.
        ranges: the rows that an expert's task computes: a part of a micro-batch's rows, or rows of several
            micro-batches, for which `micro_batch` is -1. Empty for all rows of the micro-batch.
    """

    lane: Lane
    work: Work
    verb: str
    layer: int = -1
    micro_batch: int = -1
    expert: int = -1
    operands: Any = None
    step: int = -1
    generated: int = -1
    id: int = -1
    key: int = 0
    state: int = WAITING
    waits: int = 0
    start: int = -1
    end: int = -1
    deps: list[int] = []
    inputs: int = 0
    followers: list[Task] | None = []
    device_edges: DeviceEdges | None = None
    waiter: Any = None
    _value: Any = None
    cause: BaseException | None = None
    code: CodeType | None = None
    instruction: int = -1
    taken: int = -1
    launched: int = -1
    ranges: tuple[RowRange, ...] = ()

    def __await__(self) -> Generator[Task, Any, Any]:
        if self.state < DONE or self.lane.over:  # the driver refuses a task of another run
            yield self
        if self.state != DONE:
            if type(self.cause) is TaskCancelled:  # the traceback of the same one would refer to this task
                raise TaskCancelled(*self.cause.args)
            raise self.cause or PolicyError(
                f"{self!r} was awaited by a coroutine that was resumed too early: yield the handle on, and resume "
                "the coroutine once the handle has settled"
            )
        return self._value

    def __getitem__(self, key: object) -> Any:
        raise TypeError(f"{self._handle()} has no items: await it for its value")

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"{self._handle()} has no items: await it for its value")

    def _handle(self) -> str:
        return f"what {self.label} returned is a handle, which"

    @property
    def value(self) -> Any:
        """The result of a task that is done; dicts and lists are read-only."""
        return self._value

    @property
    def phase(self) -> Phase | None:
        """The phase of the task's micro-batch; None for a task that belongs to no step."""
        return None if self.generated < 0 else phase_after(self.generated)

    @property
    def when(self) -> str:
        """The step of the task's micro-batch in words: "prefill", or "decode step N"."""
        return f"decode step {self.step}" if self.phase == "decode" else "prefill"

    @property
    def label(self) -> str:
        """The task's name for people: verb, layer, expert, micro-batch, and the range of rows if these are not all."""
        parts = [self.verb]
        if self.layer >= 0:
            parts.append(f"L{self.layer}")
        if self.expert >= 0:
            parts.append(f"E{self.expert}")
        if self.micro_batch >= 0:
            parts.append(f"mb{self.micro_batch}")
            parts += [f"rows {start}:{stop}" for _, start, stop in self.ranges]
        else:
            parts += [f"mb{micro_batch}" for micro_batch, _, _ in self.ranges]
        return " ".join(parts)

    @property
    def expert_rows(self) -> tuple[RowRange, ...]:
        """The rows that a `run_expert` task has to run: all rows of its micro-batch, or those that `ranges` names."""
        return self.ranges or (RowRange(self.micro_batch, 0, self.work.tokens),)

    @property
    def line(self) -> str:
        """The policy line that submitted the task, as `file:line`; empty where it was not recorded."""
        if self.code is None:
            return ""
        return f"{self.code.co_filename}:{_line_of(self.code, self.instruction)}"

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} #{self.id} {self.label} on {self.lane.name}: {STATE_NAMES[self.state]}>"
        )


def phase_after(generated: int) -> Phase:
    """Return the phase of sequences that have generated this number of tokens."""
    return "decode" if generated > 0 else "prefill"


def story_of(task: Task, error: BaseException) -> str:
    """Return a failed task's label, lane, number of tasks that it waited for, submitting line and error, in words."""
    waited = f"{len(task.deps)} earlier tasks" if task.deps else "nothing"
    place = f", submitted at {task.line}" if task.code is not None else ""
    try:
        said = repr(error)
    except Exception:  # as of a tensor of a device that is lost; the task must settle nevertheless
        said = f"{type(error).__name__}, whose text cannot be read"
    return f"{task.label} failed on lane {task.lane.name} after waiting for {waited}{place}: {said}"


def cancelled_by(task: Task) -> BaseException:
    """Return the error for a later task that cannot run, since it needs the result of `task`.

    This is the `TaskFailed` or `PolicyError` by which `task` failed or was cancelled; otherwise a new `TaskCancelled`.

    task: a task that failed or was cancelled.
    """
    if isinstance(task.cause, (TaskFailed, PolicyError)):
        return task.cause
    return TaskCancelled(f"cancelled, because {task.label} was")


@_set_plainly
class Kernel(Task, gc=False, eq=False):
    """An operation on the accelerator."""


@_set_plainly
class HostKernel(Task, gc=False, eq=False):
    """An operation on the host's processor: CPU attention, a CPU expert."""


@_set_plainly
class PageTransfer(Task, gc=False, eq=False):
    """A copy between memories: weight pages into slots, or a micro-batch's activations."""

    pages: tuple[Any, ...] = ()
    slots: tuple[Any, ...] = ()


@_set_plainly
class Decision(Task, gc=False, eq=False):
    """An operation whose value a policy may need: routing, sampling."""


@_set_plainly
class Preview(Decision, gc=False, eq=False):
    """A forecast of a later layer's routing.

    Attributes:
        ahead: number of layers from the micro-batch's present one to the forecast one.
    """

    ahead: int = 1


@_set_plainly
class Collective(Task, gc=False, eq=False):
    """An operation that all ranks carry out together.

    Attributes:
        ticket: its number in the sequence of collectives, which is the same on all ranks.
        signature: text that describes the operation, and must be equal on all ranks.
    """

    ticket: int = -1
    signature: str = ""


@_set_plainly
class Join(Task, gc=False, eq=False):
    """A node of the graph that takes no lane and no time; through it n readers of n pages need 2n edges, not n²."""


def priority(priority_class: int, task_id: int) -> int:
    """Return the key of a ready task, an integer that orders tasks by priority class, then by `task_id`."""
    return priority_class << CLASS_SHIFT | task_id


def class_of(task: Task) -> int:
    """Return the priority class of a task; 0 for a collective, which has none: its key comes from `Engine.admit`."""
    return 0 if type(task) is Collective else task.key >> CLASS_SHIFT


def read_only(value: object) -> object:
    """Return a read-only view or copy of a dict or list, and any other value as it is.

    Policies then cannot change a task's value, on which later verbs rely.
    """
    if isinstance(value, dict):
        return MappingProxyType(value)
    return tuple(value) if isinstance(value, list) else value


def _line_of(code: CodeType, instruction: int) -> int:
    """Return the source line of byte offset `instruction` in a code object; takes 1 µs, so use it for display only."""
    line = code.co_firstlineno
    for start, _, number in code.co_lines():
        if start > instruction:
            break
        if number is not None:
            line = number
    return line

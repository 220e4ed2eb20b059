"""The engine: builds a graph of the tasks submitted in program order, and starts those that may run.

It has no clock, no threads, no tensors. A driver calls `submit`, `finish`, `fail` and `cancel`, and the engine appends
the tasks that are to start to `started`, which the driver empties. Edges come from the data (`edges.py`).

The states of a task, and the calls that move it between them (`tasks.MOVES` is the table):

    waiting --(last edge met)--> ready --(lane free)--> running --(finish)--> done
       |                                                  |`------(fail)----> failed
       |                                                  `-(issued)-> issued --(finish, fail)--> ...
       `--(an input failed, or cancel)--> ... --(last edge met)--> cancelled

A task has settled when it is done, failed or cancelled. A task that was cancelled, or whose input failed, stays
`waiting` until all tasks that it waits for have settled, and only then becomes `cancelled`. So a later task that
overwrites the storage of a cancelled one still waits for the earlier users of that storage. Of a failed task's
`followers`, those that need its result are cancelled, and those that only have to come after it still run.

`submit`, `issued` and `finish` run for every task, so they exist twice: here, and compiled in engine.c, which inlines
`_settle`, `_release`, `_enqueue` and `_next` for plain tasks, as well as `Lane.next_task` and all edges.
Change both together; tests run random graphs through the two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from heapq import heappush
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from moesched.edges import follow, follow_users, follow_writers
from moesched.errors import TaskCancelled, TaskFailed
from moesched.stream_edges import followers_on_device, leave_to_device, wait_on_host
from moesched.tasks import (
    CANCELLED,
    CLASS_SHIFT,
    DONE,
    FAILED,
    ISSUED,
    READY,
    RUNNING,
    WAITING,
    Block,
    Collective,
    DeviceEdges,
    Join,
    Lane,
    Task,
    cancelled_by,
    priority,
    read_only,
    story_of,
)
from moesched.work import Work

T = TypeVar("T", bound=Task)

_ADMITTED = 1 << 62
"""Subtracted from the keys of admitted collectives, so that they go before all other tasks."""

_NOWHERE = Lane("join")
_NOWHERE.simple = False
_NO_WORK = Work("join", "")

_COMPILED_VERSION = 3
"""The version of engine.c whose methods do the same as the methods here."""


class PlainEngine:
    """Keeps one rank's graph of tasks, and starts the tasks on the rank's lanes; written in Python alone.

    Args:
        lanes: the serial resources that tasks run on. A ready-first lane starts the most urgent of its ready tasks; an
            in-order lane starts its tasks in program order.
    """

    __slots__ = (
        "_admitted",
        "_halted",
        "_undone",
        "arrived",
        "awaited",
        "awaits",
        "cancels",
        "failure",
        "has_streams",
        "joined",
        "joins",
        "lanes",
        "look",
        "now",
        "settled",
        "started",
        "submit_delays",
        "submitted",
        "tickets",
    )

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self.lanes = tuple(lanes)
        for index, lane in enumerate(self.lanes):
            lane.index = index
        self.has_streams = any(lane.domain is not None for lane in self.lanes)
        self.failure: TaskFailed | None = None
        """The first failure of a task; `submit` raises it, so that a policy stops at once."""
        self.started: list[Task] = []
        """Tasks that took their lane and wait for the driver to run them, oldest first."""
        self.arrived: list[Collective] = []
        """Collectives that wait only for the other ranks, until the driver calls `admit`."""
        self.awaited: list[Task] = []
        """Settled tasks that the policy awaits; the driver then resumes the policy."""
        self.joined: list[Join] | None = None
        """Joins, for a trace that draws edges through them; None if they are not recorded."""
        self.awaits: list[tuple[int, int]] | None = None
        """Awaits of the policy, for a trace: the task's id, and the number of tasks submitted by then."""
        self.submit_delays: list[tuple[int, int]] | None = None
        """Times that idle lanes waited for the policy's next task, for a trace: the task's id, and nanoseconds."""
        self.cancels: list[tuple[Task, int]] | None = None
        """Tasks that `cancel` withdrew, for a trace, and the times; None if they are not recorded."""
        self.now: Callable[[], int] = lambda: 0
        self.look: Callable[[], AbstractContextManager[int]] = lambda: nullcontext(0)
        """Returns a context that gives the driver's time in nanoseconds, and in which no task changes its state."""
        self.submitted = self.settled = self.joins = self.tickets = 0
        """Numbers of tasks submitted, tasks settled, joins submitted and collectives submitted so far."""
        self._admitted = 0
        self._halted: BaseException | None = None
        self._undone: list[Task] = []

    @property
    def unsettled(self) -> int:
        """Number of submitted tasks that have not settled."""
        return self.submitted - self.settled

    # -- called by verbs ---------------------------------------------------------------------------

    def submit(
        self,
        task: T,
        reads: Sequence[Block] = (),
        writes: Sequence[Block] = (),
        after: Sequence[Task] = (),
        priority_class: int = 0,
    ) -> T:
        """Add a new task, after all earlier ones in program order; returns the task, which is its own handle.

        Args:
            reads: blocks whose current values the task reads.
            writes: blocks to which the task gives new values; a block in both `reads` and `writes` is changed in place.
            after: further tasks that the task waits for.
            priority_class: on a ready-first lane, ready tasks of a lower class start first.

        Raises:
            TaskFailed: an earlier task failed.
        """
        if self.failure is not None:
            raise self.failure
        task.id = number = self.submitted
        self.submitted = number + 1
        task.key = priority_class << CLASS_SHIFT | number if priority_class else number
        lane = task.lane
        waits = follow_writers(task, reads)
        task.inputs = len(task.deps)
        waits += follow_users(task, writes)
        if after:
            waits += follow(task, after)
        task.waits = waits
        if lane.in_order:
            lane.queue.append(task)
        if lane.domain is not None:
            lane.unstarted.append(task)
        if not waits:
            self._unblock(task)
        return task

    def raise_failure(self) -> None:
        """Raise the first failure of a task, if there is one; `submit` does so too."""
        if self.failure is not None:
            raise self.failure

    def join(self, reads: Sequence[Block], writes: Sequence[Block], step: int = -1) -> Join:
        """Submit a join, which has no lane and no duration: readers of `writes` wait for the writers of all `reads`."""
        join = self.submit(Join(_NOWHERE, _NO_WORK, "join", step=step), reads, writes)
        self.joins += 1
        if self.joined is not None:
            self.joined.append(join)
        return join

    def collective(self, task: Collective, reads: Sequence[Block], writes: Sequence[Block]) -> Collective:
        """Submit `task`, this rank's part of a collective; the order of these calls must be the same on all ranks."""
        task.lane.simple = False
        task.ticket = self.tickets
        self.submit(task, reads, writes)
        self.tickets += 1
        return task

    def cancel(self, task: Task) -> bool:
        """Cancel a task that has not started, and those that need its result; returns whether the task was cancelled.

        An admitted collective counts as started, since the other ranks rely on this rank's part.
        """
        started = READY if isinstance(task, Collective) else RUNNING
        if task.state >= started or task.cause is not None:
            return False
        task.cause = TaskCancelled(f"{task.label} was cancelled before it started")
        if isinstance(task, Collective):
            if not task.waits:
                self.arrived.append(task)
        elif task.state == READY:
            self._withdraw(task)
        if self.cancels is not None:
            self.cancels.append((task, self.now()))
        return True

    def promote(self, task: Task, priority_class: int) -> None:
        """Give a task that has not started a lower, more urgent priority class; a higher one has no effect."""
        key = priority(priority_class, task.id)
        if key >= task.key or task.state >= RUNNING:
            return
        if task.state == READY:
            task.lane.advance(task, key)
        task.key = key

    # -- called by drivers -------------------------------------------------------------------------

    def finish(self, task: Task, value: object = None) -> None:
        """Settle a running task that succeeded, with the result `value`; tasks that may start now go to `started`."""
        if value is not None:
            task._value = read_only(value)
        self._end_on_device(task)
        self._leave(task.lane, task)

    def fail(self, task: Task, error: BaseException) -> None:
        """Settle a running task that raised `error`. Tasks that need its result are cancelled; others still run."""
        failure = TaskFailed(story_of(task, error))
        failure.__cause__ = error
        task.cause = failure
        if self.failure is None:
            self.failure = failure
        self._settle(task, FAILED)
        self._leave(task.lane, task)

    def policy_waits(self, task: Task) -> None:
        """Note that the policy awaits an unsettled task, and submits nothing until that task has settled."""
        if self.awaits is not None:
            self.awaits.append((task.id, self.submitted))

    def issued(self, task: Task) -> None:
        """Note that a running task was enqueued on its stream; tasks of the same device that wait for it may follow.

        The device itself makes these tasks wait (`before_on_device`). The lane starts its next task, if it may
        have one more task on the stream (see `Lane.depth`).
        """
        lane = task.lane
        task.state = ISSUED
        for other in leave_to_device(task):
            other.waits -= 1
            if not other.waits:
                self._unblock(other)
        lane.in_flight += 1
        lane.running = None
        self._next(lane)

    def admit(self, task: Collective) -> None:
        """Let a collective take its lane, once all ranks have arrived.

        On a ready-first lane, only collectives admitted earlier go before this one. The order of admission is
        the same on all ranks, so no two ranks hold their lanes for different collectives and wait for each other.
        """
        if task.cause is not None:
            self._settle(task, CANCELLED)
            return
        task.state = READY
        task.key = self._admitted - _ADMITTED
        self._admitted += 1
        self._enqueue(task)

    def halt(self, cause: BaseException) -> None:
        """Cancel, with the error `cause`, all tasks that have not started, except collectives that all ranks reached.

        Ready tasks are cancelled now, waiting ones as they become ready.
        """
        self._halted = cause
        ready = []
        for lane in self.lanes:
            lane.simple = False
            ready += lane.remove_all()
        for task in ready:
            task.cause = cause
            task.state = WAITING if wait_on_host(task) else CANCELLED
        for task in ready:
            if task.state == CANCELLED:
                self._settle(task, CANCELLED)

    def forget(self) -> None:
        """Drop the errors of a finished run, and mark its lanes as over, so that the run's handles are refused.

        The errors' tracebacks refer to tasks, and tasks to errors and lanes. The garbage collector, which does not
        track tasks, would never free such a cycle.
        """
        while self._undone:
            self._undone.pop().cause = None
        for lane in self.lanes:
            lane.over = True
            lane.unstarted.clear()
        self.failure = self._halted = None

    # -- the state machine -------------------------------------------------------------------------

    def _unblock(self, task: Task) -> None:
        """Make a task ready, or settle it, once all its edges are met."""
        ended: list[Task] = []
        self._release(task, ended)
        if ended:
            self._settle_all(ended)

    def _release(self, task: Task, ended: list[Task]) -> None:
        """Move a task whose edges are all met to its next state; append it to `ended` if it ends without running."""
        lane = task.lane
        if self._halted is not None and task.cause is None and lane is not _NOWHERE and task.state != ISSUED:
            task.cause = self._halted
        if task.cause is not None:
            if not wait_on_host(task):
                task.state = CANCELLED
                ended.append(task)
        elif lane is _NOWHERE:
            task.state = DONE
            ended.append(task)
        elif task.state == ISSUED:
            self._settle(task, DONE)
        elif type(task) is Collective:
            self.arrived.append(task)
        else:
            task.state = READY
            self._enqueue(task)

    def _enqueue(self, task: Task) -> None:
        """Put a ready task into its lane's queue, and start the lane's next task if the lane is free."""
        lane = task.lane
        if not lane.in_order:
            heappush(lane.heap, (task.key, task))
        if lane.running is None:
            self._next(lane)

    def _end_on_device(self, task: Task) -> None:
        """Settle a task that ended on the device, as soon as all tasks that the device runs before it have settled."""
        if not wait_on_host(task):
            self._settle(task, DONE if task.cause is None else CANCELLED)

    def _withdraw(self, task: Task) -> None:
        """Take a ready task out of its lane's queue and cancel it."""
        task.lane.remove(task)
        if wait_on_host(task):
            task.state = WAITING
        else:
            self._settle(task, CANCELLED)

    def _leave(self, lane: Lane, task: Task) -> None:
        """Free the place of a task that ended on its lane, and start the lane's next task.

        A task that was issued to a stream is no longer `lane.running`; its end lowers `lane.in_flight` instead. If a
        later task of the lane runs already, no further task is started.
        """
        if lane.running is task:
            lane.running = None
        else:
            lane.in_flight -= 1
        if lane.running is None:
            self._next(lane)

    def _next(self, lane: Lane) -> None:
        """Start the next task of an idle lane, if one may start."""
        task = lane.next_task()
        if task is not None:
            self._start(lane, task)

    def _start(self, lane: Lane, task: Task) -> None:
        lane.running = task
        task.state = RUNNING
        self.started.append(task)

    def _settle(self, task: Task, state: int) -> None:
        """Set a task's final state and release its followers, and in turn those of followers that end at once."""
        task.state = state
        self._settle_all([task])

    def _settle_all(self, ended: list[Task]) -> None:
        """Release the followers of tasks that are over; followers that end without running join the list `ended`."""
        for task in ended:
            self.settled += 1
            task.operands = None
            if task.waiter is not None:
                self.awaited.append(task)
            if task.state != DONE:
                self._pass_failure(task)
            followers = task.followers or ()
            task.followers = None
            for other in followers:
                other.waits -= 1
                if not other.waits:
                    self._release(other, ended)

    def _pass_failure(self, task: Task) -> None:
        """Cancel the tasks that need the result of a failed or cancelled one; an idle in-order lane goes on."""
        if type(task.cause) is not TaskCancelled or task.cause.__traceback__ is not None:
            self._undone.append(task)  # a policy may cancel tasks for days
        for other in (*(task.followers or ()), *followers_on_device(task)):
            if other.cause is None and task.id in other.deps[: other.inputs]:
                other.cause = cancelled_by(task)
                if other.state == READY:
                    self._withdraw(other)
        if type(task) is Collective and task.state == CANCELLED:
            self.arrived.append(task)
        if task.lane.in_order and task.lane.running is None:
            self._next(task.lane)


def _compiled_methods() -> tuple[Any, Any, Any]:
    """Load the methods in engine.c; without a compiled engine.c of this version, return those in Python."""
    classes = PlainEngine, Task, Block, Lane, DeviceEdges
    try:
        compiled = import_module("moesched._engine")
        methods: tuple[Any, Any, Any] = compiled.methods(_COMPILED_VERSION, *classes, read_only, cancelled_by)
    except ImportError:
        return PlainEngine.submit, PlainEngine.issued, PlainEngine.finish
    return methods


class Engine(PlainEngine):
    """A `PlainEngine` with three compiled methods, if there was a C compiler at the installation."""

    __slots__ = ()

    if not TYPE_CHECKING:
        submit, issued, finish = _compiled_methods()

"""The checking mode: an engine that checks every transition against the rules, and the ledger against itself.

It keeps a plain account of its own (who waits for whom, what is ready on which lane) beside the engine's fast one and
compares the two after every call. Rules that are broken while lanes run, perhaps on other threads, are collected and
raised at the next `submit` or by `check_over`, so that a broken rule never turns into a hang.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from moesched.drivers.realtime import SharedEngine
from moesched.engine import Engine, T
from moesched.errors import PolicyError, TaskCancelled, TaskFailed
from moesched.steps.memory import Memory, Pool, Views
from moesched.steps.run_state import RunState
from moesched.tasks import (
    CANCELLED,
    DONE,
    FAILED,
    ISSUED,
    READY,
    RUNNING,
    STATE_NAMES,
    WAITING,
    Block,
    Collective,
    Join,
    Lane,
    Task,
)

SWITCH = "MOESCHED_VALIDATE"
"""Set to 1 in the environment, it has every run checked."""

LEGAL = {
    (WAITING, READY),
    (WAITING, RUNNING),
    (WAITING, CANCELLED),
    (READY, RUNNING),
    (READY, CANCELLED),
    (RUNNING, DONE),
    (RUNNING, FAILED),
    (RUNNING, ISSUED),
    (ISSUED, DONE),
    (ISSUED, FAILED),
    (ISSUED, CANCELLED),
}
"""The moves that one call may make: a task that becomes ready takes its lane at once where that is free.

Only a task that a stream had taken in can have run and yet be cancelled: what came before it on the device failed.
"""

LEGAL_FOR_JOINS = {(WAITING, DONE), (WAITING, CANCELLED)}
"""A join takes no lane."""

LEDGER_EVERY = 64
"""The ledger is compared with itself once in so many submissions, at the first after a failure, and at the end."""


class BrokenRule(AssertionError):
    """The engine broke one of its rules: a bug in it, not in the policy."""


def switched_on() -> bool:
    """Whether the environment asks for every run to be checked."""
    return os.environ.get(SWITCH, "") not in ("", "0")


def new_engine(lanes: Iterable[Lane]) -> Engine:
    """An engine for a run on the virtual clock, checked where the environment asks for it."""
    return CheckedEngine(lanes) if switched_on() else Engine(lanes)


def new_shared_engine(lanes: Iterable[Lane]) -> SharedEngine:
    """An engine for a run in real time, checked where the environment asks for it."""
    return CheckedSharedEngine(lanes) if switched_on() else SharedEngine(lanes)


@contextmanager
def watching(run_state: RunState) -> Iterator[None]:
    """Have the ledger of a schedule checked while it runs, and all rules once it has ended, well or not.

    Does nothing where the schedule's engine is not a checked one.

    Raises:
        BrokenRule: a rule was broken.
    """
    engine, plan = run_state.engine, run_state.plan
    if not isinstance(engine, CheckedEngine):
        yield
        return
    views = [each for stage in run_state.stages for each in stage.views]
    engine.watch(plan.memories.values(), [*plan.pools, *plan.resident], views)
    try:
        yield
    except (PolicyError, TaskFailed, TaskCancelled):
        engine.check_over()
        raise
    engine.check_over()


class CheckedEngine(Engine):
    """An engine that checks itself. Slower by about ten times; for tests, and for whoever distrusts a policy."""

    submit_frames = Engine.submit_frames + 1

    def __init__(self, lanes: Iterable[Lane], *, halt_on_failure: bool = True) -> None:
        super().__init__(lanes, halt_on_failure=halt_on_failure)
        self.broken: list[str] = []
        """The rules that were broken so far."""
        self.tasks: list[Task] = []
        """All tasks in program order."""
        self._known: list[int] = []
        self._left: list[int] = []
        self._later: list[list[int]] = []
        self._inputs: list[list[Task]] = []
        self._open: set[int] = set()
        self._released: dict[int, list[int]] = {}
        self._something_failed = False
        self._calls = 0
        self._lanes = {lane: _LaneAccount(lane) for lane in self.lanes}
        self._memories: list[Memory] = []
        self._pools: list[Pool] = []
        self._views: list[Views[Any]] = []

    def watch(
        self,
        memories: Iterable[Memory] = (),
        pools: Iterable[Pool] = (),
        views: Iterable[Views[Any]] = (),
    ) -> None:
        """Have the ledger of these checked too."""
        self._memories += memories
        self._pools += pools
        self._views += views

    # -- the engine's calls, each followed by a look at what it did -----------------------------------

    def submit(
        self,
        task: T,
        reads: Sequence[Block] = (),
        writes: Sequence[Block] = (),
        after: Sequence[Task] = (),
        transfer_class: int = 0,
    ) -> T:
        self.check()
        inputs = [block.writer for block in reads if block.writer is not None]
        expected = _edges(reads, writes, after)
        super().submit(task, reads, writes, after, transfer_class)
        self._enter(task, inputs, expected, by_hand=len(after))
        self._look(task)
        if task.id % LEDGER_EVERY == 0 or self._something_failed:
            self._look_at_ledger()
        return task

    def cancel(self, task: Task) -> bool:
        before = task.state
        cancelled = super().cancel(task)
        self._expect(
            not cancelled or before < RUNNING, f"{task!r} was withdrawn although it was {STATE_NAMES[before]}"
        )
        self._look(task)
        return cancelled

    def promote(self, task: Task, transfer_class: int) -> None:
        before = task.key
        super().promote(task, transfer_class)
        self._expect(task.key <= before, f"{task!r} was lifted to a less urgent class")

    def finish(self, task: Task, value: object = None) -> None:
        self._expect_running(task)
        super().finish(task, value)
        if task.state == ISSUED:
            self._await_device(task)
        self._look(task)

    def fail(self, task: Task, error: BaseException) -> None:
        self._expect_running(task)
        super().fail(task, error)
        self._look(task)
        self._something_failed = True

    def issued(self, task: Task) -> None:
        self._expect_running(task)
        super().issued(task)
        self._released[task.id] = []
        released = [number for number in self._later[task.id] if self._on_device(task.id, self.tasks[number])]
        self._released[task.id] = released
        self._later[task.id] = [number for number in self._later[task.id] if number not in released]
        for number in released:
            self._left[number] -= 1
        self._look(task, *(self.tasks[number] for number in released))

    def admit(self, task: Collective) -> None:
        account = self._lanes[task.lane]
        self._expect(not self._left[task.id], f"{task!r} was admitted before its edges were met")
        self._expect(task.id not in account.admitted, f"{task!r} was admitted twice")
        account.admitted.add(task.id)
        super().admit(task)
        self._look(task)

    def halt(self, cause: BaseException) -> None:
        super().halt(cause)
        self._look(*(self.tasks[number] for number in sorted(self._open)))

    # -- what a test asks ---------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the rules that were broken so far.

        Raises:
            BrokenRule: naming the first few.
        """
        if self.broken:
            raise BrokenRule("; ".join(self.broken[:3]))

    def check_over(self) -> None:
        """Check that a run has ended as it should: all tasks settled, all lanes idle, the ledger in order."""
        self._expect(self.settled == self.submitted, f"{self.submitted - self.settled} tasks never settled")
        self._expect(
            not self._open, f"never settled: {[self.tasks[number] for number in sorted(self._open)[:5]]}"
        )
        for lane in self.lanes:
            waiting = [task for _, task in lane.heap] + [task for task in lane.queue if task.state < DONE]
            self._expect(lane.running is None and not waiting, f"lane {lane.name} is not empty at the end")
        self._look_at_ledger()
        self.check()

    # -- the account --------------------------------------------------------------------------------

    def _enter(self, task: Task, inputs: list[Task], expected: set[int], by_hand: int) -> None:
        """A task was submitted: note whom it waits for, as the blocks said before."""
        self._expect(task.id == len(self.tasks), f"{task!r} does not follow #{len(self.tasks) - 1}")
        self._expect(
            set(task.deps) == expected, f"{task!r} has edges {sorted(set(task.deps))}, not {sorted(expected)}"
        )
        self._expect(all(earlier < task.id for earlier in task.deps), f"{task!r} waits for a later task")
        self.tasks.append(task)
        self._known.append(WAITING)
        self._later.append([])
        self._inputs.append(inputs)
        data = len(task.deps) - by_hand
        waits = [
            earlier
            for position, earlier in enumerate(task.deps)
            if earlier in self._open and (position >= data or not self._on_device(earlier, task))
        ]
        self._left.append(len(waits))
        for earlier in waits:
            self._later[earlier].append(task.id)
        for earlier in {*task.deps} - {*waits} & self._open:
            self._released[earlier].append(task.id)
        self._open.add(task.id)
        if not isinstance(task, Join):
            self._lanes[task.lane].order.append(task)

    def _await_device(self, task: Task) -> None:
        """A task that has run, or is cancelled, settles after those that it waited for on its device."""
        waits = [other.id for other in task.after or () if other.id in self._open]
        self._left[task.id] = len(waits)
        for earlier in waits:
            self._later[earlier].append(task.id)

    def _look(self, *tasks: Task) -> None:
        """Compare tasks, and all that their ends may have moved, with the account; then the lanes."""
        ended_lanes = {
            task.lane for task in tasks if task.state in (DONE, FAILED) and task.lane.domain is None
        }
        self._calls += 1
        changed = list(tasks)
        for task in changed:
            if task.id not in self._open:
                continue
            self._compare(task)
            if task.state >= DONE:
                self._open.discard(task.id)
                for later in self._later[task.id]:
                    self._left[later] -= 1
                moved = self._later[task.id] + self._released.get(task.id, [])
                changed += [self.tasks[number] for number in moved]
                self._later[task.id] = []
        for task in changed:
            if task.id in self._open:
                self._expect_waiting(task)
        for lane, account in self._lanes.items():
            if lane.running is not None:
                self._compare(lane.running)
            self.broken += account.problems(self._calls, just_ended=lane in ended_lanes)
        self._expect(self.settled == self.submitted - len(self._open), "the count of settled tasks is off")

    def _compare(self, task: Task) -> None:
        """Check the move from the state that was last seen to the present one."""
        before, after = self._known[task.id], task.state
        if before == after:
            return
        self._known[task.id] = after
        legal = LEGAL_FOR_JOINS if isinstance(task, Join) else LEGAL
        withdrawn = (before, after) == (READY, WAITING) and task.cause is not None and task.after is not None
        self._expect((before, after) in legal or withdrawn, f"{task!r} was {STATE_NAMES[before]}")
        if after in (READY, RUNNING, DONE):
            missing = [earlier for earlier in self._inputs[task.id] if earlier.state != DONE]
            ahead = ISSUED if after != DONE else DONE
            lost = [each for each in missing if each.state != ahead or not self._on_device(each.id, task)]
            self._expect(not lost, f"{task!r} goes on although its input {lost} is not there")
        if after in (FAILED, CANCELLED):
            self._expect(task.cause is not None, f"{task!r} ended without a cause")
        if after == CANCELLED:
            self._expect(task.start < 0 or before == ISSUED, f"{task!r} ran before it was cancelled")
        if not isinstance(task, Join):
            self._lanes[task.lane].move(task, self._calls)

    def _on_device(self, earlier: int, task: Task) -> bool:
        """Whether the edge between two tasks holds on their device, since a stream took the earlier one in."""
        domain = task.lane.domain
        return domain is not None and domain == self.tasks[earlier].lane.domain and earlier in self._released

    def _expect_waiting(self, task: Task) -> None:
        cancelled_once_it_ran = (
            task.state == RUNNING and task.cause is not None
        )  # what it needed failed meanwhile
        if task.state == ISSUED or cancelled_once_it_ran:
            return
        if task.cause is not None and task.after is not None and not self._left[task.id]:
            self._await_device(task)
        left = self._left[task.id]
        self._expect(task.waits == left, f"{task!r} counts {task.waits} earlier tasks, {left} are unsettled")
        if left:
            self._expect(task.state == WAITING, f"{task!r} does not wait for the {left} tasks before it")
        elif task.state == WAITING:
            self._expect(isinstance(task, Collective), f"{task!r} waits for nothing")

    def _expect_running(self, task: Task) -> None:
        running = task.state == RUNNING and task.lane.running is task
        self._expect(running or task.state == ISSUED, f"{task!r} ended without having its lane")

    def _expect(self, holds: bool, rule: str) -> None:
        if not holds:
            self.broken.append(rule)

    def _look_at_ledger(self) -> None:
        """Called from where the policy runs: the ledger is kept in program order, whatever the lanes do meanwhile."""
        self._something_failed = False
        for memory in self._memories:
            self.broken += ledger_problems(memory, [pool for pool in self._pools if pool.memory is memory])
        for views in self._views:
            self.broken += view_problems(views)


class CheckedSharedEngine(SharedEngine, CheckedEngine):
    """The same for lanes on other threads: the checks run under the engine's lock."""

    submit_frames = SharedEngine.submit_frames + 1


class _LaneAccount:
    """What one lane should be doing."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.order: deque[Task] = deque()
        self.ready: dict[Task, int] = {}
        self.admitted: set[int] = set()
        self.running: Task | None = None
        self.fresh: list[Task] = []

    def move(self, task: Task, call: int) -> None:
        """A task of this lane changed its state during a call."""
        self.ready.pop(task, None)
        if task.state == READY:
            self.ready[task] = call
        elif task.state == RUNNING:
            self.fresh.append(task)
        elif task is self.running:
            self.running = None

    def problems(self, call: int, *, just_ended: bool) -> list[str]:
        """What is wrong with the lane after a call; `just_ended` says whether the call ended a task of this lane."""
        wrong = []
        for task in self.fresh:
            wrong += self._start(task, call if just_ended else call - 1)
            self.running = task
        self.fresh.clear()
        if self.lane.running is not self.running:
            wrong.append(f"lane {self.lane.name} runs {self.lane.running!r}, but {self.running!r} has it")
        elif not 0 <= self.lane.in_flight <= self.lane.depth:
            wrong.append(f"lane {self.lane.name} has {self.lane.in_flight} tasks in flight")
        elif self.running is None and self.lane.in_flight < self.lane.depth and self._startable() is not None:
            wrong.append(f"lane {self.lane.name} is idle, but {self._startable()!r} could run")
        return wrong

    def _start(self, task: Task, call: int) -> list[str]:
        """What is wrong with a start; only tasks that were ready by `call` can have been overtaken."""
        wrong = []
        if self.running is not None:
            wrong.append(f"{task!r} runs beside {self.running!r}")
        if isinstance(task, Collective) and task.id not in self.admitted:
            wrong.append(f"{task!r} started before all ranks had arrived")
        if self.lane.in_order:
            first = self._first()
            if first is not task:
                wrong.append(f"{task!r} started before {first!r}, which was submitted before it")
        else:
            urgent = [other for other, since in self.ready.items() if since <= call and other.key < task.key]
            if urgent:
                wrong.append(f"{task!r} started before {urgent[0]!r}, which is more urgent")
        return wrong

    def _startable(self) -> Task | None:
        if not self.lane.in_order:
            return next(iter(self.ready), None)
        first = self._first()
        return first if first is not None and first.state == READY else None

    def _first(self) -> Task | None:
        """The earliest task of the lane that has not ended, nor runs already."""
        while self.order and (self.order[0].state >= ISSUED or self.order[0] is self.running):
            self.order.popleft()
        return self.order[0] if self.order else None


def ledger_problems(memory: Memory, pools: Iterable[Pool] = ()) -> list[str]:
    """What contradicts itself in a memory's books: bytes, page table, slots."""
    problems = []
    freed = sum(nbytes for nbytes, _ in memory._freed)
    if memory.used + memory._fresh + freed != memory.capacity:
        problems.append(
            f"{memory.name}: {memory.used:,} bytes used, {memory._fresh:,} fresh and {freed:,} freed "
            f"are not its {memory.capacity:,}"
        )
    if not 0 <= memory.used <= memory.peak <= memory.capacity or memory._fresh < 0:
        problems.append(f"{memory.name}: {memory.used:,} bytes used of {memory.capacity:,}")
    for number, slot in memory.table.items():
        if slot.tag != number or slot.page is None or slot.page.id != number:
            problems.append(f"{memory.name}: page #{number} is not in {slot!r}, where the table has it")
        if slot.pool._held.get(number) is not slot:
            problems.append(
                f"{memory.name}: page #{number} is in the table, but not in pool {slot.pool.name}"
            )
    for pool in pools:
        problems += _pool_problems(pool)
    return problems


def _pool_problems(pool: Pool) -> list[str]:
    problems = []
    empty = [slot.index for slot in pool._empty]
    held = [slot.index for slot in pool._held.values()]
    if sorted(empty + held) != list(range(len(pool.slots))):
        problems.append(
            f"pool {pool.name}: slots {sorted(empty)} empty and {sorted(held)} held are not its slots"
        )
    for number, slot in pool._held.items():
        if pool.memory.table.get(number) is not slot:
            problems.append(f"pool {pool.name}: holds page #{number}, but the table has it elsewhere")
    for slot in pool._empty:
        if slot.page is not None or slot.tag is not None or slot.views:
            problems.append(f"pool {pool.name}: {slot.name} is empty, but not clean")
    return problems


def view_problems(views: Views[Any]) -> list[str]:
    """What is wrong with the open views: one that shows a slot which holds another page by now."""
    problems = []
    for key, view in views.open.items():
        for page, slot in zip(view.pages, view.slots, strict=True):
            if slot.page is not page or views.memory.table.get(page.id) is not slot:
                problems.append(f"view {key} shows {slot.name}, which does not hold its page any more")
            if not slot.fixed and view not in slot.views:
                problems.append(f"view {key} reads {slot.name}, which does not know it")
    return problems


def _edges(reads: Sequence[Block], writes: Sequence[Block], after: Sequence[Task]) -> set[int]:
    """The tasks that a new one must wait for by the rules: read after write, write after read, write after write."""
    earlier = {block.writer.id for block in reads if block.writer is not None}
    earlier |= {task.id for task in after}
    seen: set[int] = {id(block) for block in reads}
    for block in writes:
        earlier |= {reader.id for reader in block.readers}
        if not block.readers and id(block) not in seen and block.writer is not None:
            earlier.add(block.writer.id)
    return earlier

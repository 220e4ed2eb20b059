"""Plain model of an engine's task graph and lanes, with which the checking mode compares the fast engine.

The model stores, for each task, the earlier tasks that this task waits for, and, for each lane, the ready tasks. It has
none of the engine's short cuts. Each rule that the engine breaks is kept as a line of text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from moesched.stream_edges import before_on_device
from moesched.tasks import (
    CANCELLED,
    DONE,
    FAILED,
    ISSUED,
    JOIN_MOVES,
    MOVES,
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


class Account:
    """The expected state of all tasks of one engine.

    Attributes:
        tasks: all tasks in program order.
        open: ids of tasks that have not settled: they are neither done nor failed nor cancelled.
        broken: descriptions of the rules broken so far.
    """

    def __init__(self, lanes: Iterable[Lane]) -> None:
        self.tasks: list[Task] = []
        self.open: set[int] = set()
        self.broken: list[str] = []
        self._known: list[int] = []
        self._left: list[int] = []
        self._later: list[list[int]] = []
        self._inputs: list[list[Task]] = []
        self._released: dict[int, list[int]] = {}
        self._calls = 0
        self._lanes = {lane: _LaneAccount(lane) for lane in lanes}

    def enter(self, task: Task, inputs: list[Task], expected: set[int], by_hand: int) -> None:
        """Record a submitted task, and check that the engine made it wait for the expected tasks.

        Args:
            task: the submitted task; its `deps` are the ids of the tasks that it waits for in the engine.
            inputs: the tasks whose results `task` needs.
            expected: ids of the tasks that `task` has to wait for, because of the blocks that it reads and writes or
                because they were given to `Engine.submit` as `after`.
            by_hand: number of ids at the end of `task.deps` that come from `after` and not from blocks.
        """
        deps = set(task.deps)
        if task.id != len(self.tasks):
            self.broken.append(f"{task!r} does not follow #{len(self.tasks) - 1}")
        if deps != expected:
            self.broken.append(f"{task!r} has edges {sorted(deps)}, not {sorted(expected)}")
        if deps and max(deps) >= task.id:
            self.broken.append(f"{task!r} waits for a later task")
        self.tasks.append(task)
        self._known.append(WAITING)
        self._later.append([])
        self._inputs.append(inputs)
        data = len(task.deps) - by_hand
        waits = [
            earlier
            for position, earlier in enumerate(task.deps)
            if earlier in self.open and (position >= data or not self._on_device(earlier, task))
        ]
        self._left.append(len(waits))
        for earlier in waits:
            self._later[earlier].append(task.id)
        for earlier in deps - {*waits} & self.open:
            self._released[earlier].append(task.id)
        self.open.add(task.id)
        if not isinstance(task, Join):
            self._lanes[task.lane].order.append(task)

    def issue(self, task: Task) -> list[Task]:
        """Record that a task was issued to a stream of its device.

        Returns:
            the later tasks on streams of the same device that wait for `task`; the device, not the host, now keeps the
            order.
        """
        self._released[task.id] = []
        released = [number for number in self._later[task.id] if self._on_device(task.id, self.tasks[number])]
        self._released[task.id] = released
        self._later[task.id] = [number for number in self._later[task.id] if number not in released]
        for number in released:
            self._left[number] -= 1
        return [self.tasks[number] for number in released]

    def admit(self, task: Collective) -> None:
        """Record that the engine admitted a collective to its lane, as all ranks have arrived at this collective."""
        account = self._lanes[task.lane]
        if self._left[task.id]:
            self.broken.append(f"{task!r} was admitted before its edges were met")
        if task.id in account.admitted:
            self.broken.append(f"{task!r} was admitted twice")
        account.admitted.add(task.id)

    def promote(self, task: Task, before: int) -> None:
        """Record that a task's priority was raised; `before` is its previous sort key, and smaller keys go first."""
        if task.key > before:
            self.broken.append(f"{task!r} was promoted to a less urgent class")
        if task.state == READY:
            self._lanes[task.lane].queue(task)

    def unsettled(self) -> list[Task]:
        """Return the tasks that have not settled, in program order."""
        return [self.tasks[number] for number in sorted(self.open)]

    def await_device(self, task: Task) -> None:
        """Record that a task that has run, or will be cancelled, settles only after earlier tasks on its device."""
        waits = [other.id for other in before_on_device(task) if other.id in self.open]
        self._left[task.id] = len(waits)
        for earlier in waits:
            self._later[earlier].append(task.id)

    def look(self, *tasks: Task) -> None:
        """Check, after a call to the engine, that `tasks`, the tasks that they release, and all lanes obey the rules.

        Args:
            tasks: tasks whose state the call may have changed.
        """
        self._calls += 1
        known, still_open = self._known, self.open
        changed = list(tasks)
        for task in changed:
            if task.id not in still_open:
                continue
            if task.state != known[task.id]:
                self._compare(task)
            if task.state >= DONE:
                still_open.discard(task.id)
                for later in self._later[task.id]:
                    self._left[later] -= 1
                moved = self._later[task.id] + self._released.get(task.id, [])
                changed += [self.tasks[number] for number in moved]
                self._later[task.id] = []
        for task in changed:
            if task.id in still_open:
                self._expect_waiting(task)
        for lane, account in self._lanes.items():
            running = lane.running
            if running is not None and running.state != known[running.id]:
                self._compare(running)
            if account.fresh:
                ended = any(each.lane is lane and each.state in (DONE, FAILED) for each in tasks)
                self.broken += account.start(self._calls, just_ended=ended and lane.domain is None)
            if problem := account.problem():
                self.broken.append(problem)

    def _compare(self, task: Task) -> None:
        """Check that a task may move from the state that was last seen here to its present, different state."""
        before, after = self._known[task.id], task.state
        self._known[task.id] = after
        moves = JOIN_MOVES if isinstance(task, Join) else MOVES
        if after not in moves.get(before, ()):
            withdrawn = (before, after) == (READY, WAITING) and task.cause is not None
            if not (withdrawn and before_on_device(task)):
                self.broken.append(f"{task!r} was {STATE_NAMES[before]}")
        missing = [earlier for earlier in self._inputs[task.id] if earlier.state != DONE]
        if missing and after in (READY, RUNNING, DONE):
            ahead = ISSUED if after != DONE else DONE
            lost = [each for each in missing if each.state != ahead or not self._on_device(each.id, task)]
            if lost:
                self.broken.append(f"{task!r} goes on although its input {lost} was lost")
        if after in (FAILED, CANCELLED) and task.cause is None:
            self.broken.append(f"{task!r} ended without a cause")
        if after == CANCELLED and task.start >= 0 and before != ISSUED:
            self.broken.append(f"{task!r} ran before it was cancelled")
        if not isinstance(task, Join):
            self._lanes[task.lane].move(task, self._calls)

    def _on_device(self, earlier: int, task: Task) -> bool:
        """Test whether the device, not the host, keeps `task` behind an earlier task on one of the device's streams."""
        domain = task.lane.domain
        return domain is not None and domain == self.tasks[earlier].lane.domain and earlier in self._released

    def _expect_waiting(self, task: Task) -> None:
        cancelled_once_it_ran = (
            task.state == RUNNING and task.cause is not None
        )  # what it needed failed meanwhile
        if task.state == ISSUED or cancelled_once_it_ran:
            return
        if task.cause is not None and before_on_device(task) and not self._left[task.id]:
            self.await_device(task)
        left = self._left[task.id]
        if task.waits != left:
            self.broken.append(f"{task!r} counts {task.waits} earlier tasks, {left} are unsettled")
        if left and task.state != WAITING:
            self.broken.append(f"{task!r} does not wait for the {left} tasks before it")
        if not left and task.state == WAITING and not isinstance(task, Collective):
            self.broken.append(f"{task!r} waits for nothing")

    def expect_running(self, task: Task) -> None:
        """Check that a task about to end is the one that runs on its lane."""
        running = task.state == RUNNING and task.lane.running is task
        if not running and task.state != ISSUED:
            self.broken.append(f"{task!r} ended without holding its lane")


class _LaneAccount:
    """The expected state of one lane: the task that should run, and those that may start."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.order: deque[Task] = deque()
        self.ready: dict[Task, int] = {}
        self.by_key: list[tuple[int, Task]] = []
        self.admitted: set[int] = set()
        self.running: Task | None = None
        self.fresh: list[Task] = []

    def move(self, task: Task, call: int) -> None:
        """Record that a task of this lane changed its state during call number `call` to the engine."""
        self.ready.pop(task, None)
        if task.state == READY:
            self.ready[task] = call
            self.queue(task)
        elif task.state == RUNNING:
            self.fresh.append(task)
        elif task is self.running:
            self.running = None

    def queue(self, task: Task) -> None:
        """Add a ready task to the lane's heap under the task's current key; an in-order lane has no heap."""
        if not self.lane.in_order:
            heappush(self.by_key, (task.key, task))

    def start(self, call: int, *, just_ended: bool) -> list[str]:
        """Return the rules that tasks broke when they started in a call to the engine, as lines of text.

        Args:
            call: number of the call.
            just_ended: whether a task of this lane ended in the call. If so, a started task breaks a rule if a more
                urgent task was ready by the end of this call; if not, only if one was ready before the call.
        """
        wrong = []
        for task in self.fresh:
            wrong += self._start(task, call if just_ended else call - 1)
            self.running = task
        self.fresh.clear()
        return wrong

    def problem(self) -> str | None:
        """Return a rule that the lane breaks after a call to the engine, as a line of text; None if it breaks none."""
        lane = self.lane
        if lane.running is not self.running:
            return f"lane {lane.name} runs {lane.running!r}, but {self.running!r} holds it"
        if not 0 <= lane.in_flight <= lane.depth_in_order:
            return f"lane {lane.name} has {lane.in_flight} tasks in flight"
        if self.running is None and lane.in_flight < lane.depth and (task := self._startable()) is not None:
            return f"lane {lane.name} is idle, but {task!r} could run"
        return None

    def _start(self, task: Task, call: int) -> list[str]:
        """Return the rules that the start of `task` breaks, as lines of text.

        For example, it must not overtake a more urgent task that became ready in or before call `call` to the engine.
        """
        wrong = []
        if self.running is not None:
            wrong.append(f"{task!r} runs beside {self.running!r}")
        if isinstance(task, Collective) and task.id not in self.admitted:
            wrong.append(f"{task!r} started before all ranks had arrived")
        first = self._first()
        if first is not task and (self.lane.in_order or self.lane.in_flight >= self.lane.depth):
            wrong.append(f"{task!r} started before {first!r}, which was submitted before it")
        if not self.lane.in_order:
            urgent = self._more_urgent(task, call)
            if urgent is not None:
                wrong.append(f"{task!r} started before {urgent!r}, which is more urgent")
        return wrong

    def _more_urgent(self, task: Task, call: int) -> Task | None:
        """Return a task more urgent than `task` that became ready in or before call `call` to the engine; else None."""
        too_fresh = []
        found = None
        while found is None and self.by_key and self.by_key[0][0] < task.key:
            key, other = entry = heappop(self.by_key)
            if other not in self.ready or key != other.key:
                continue  # it left the queue, or was promoted and stands there once more
            too_fresh.append(entry)
            if self.ready[other] <= call:
                found = other
        for entry in too_fresh:
            heappush(self.by_key, entry)
        return found

    def _startable(self) -> Task | None:
        if not self.lane.in_order:
            return next(iter(self.ready), None)
        first = self._first()
        return first if first is not None and first.state == READY else None

    def _first(self) -> Task | None:
        """Return the first task of the lane, in program order, that has neither ended nor started."""
        while self.order and (self.order[0].state >= ISSUED or self.order[0] is self.running):
            self.order.popleft()
        return self.order[0] if self.order else None


def expected_edges(reads: Sequence[Block], writes: Sequence[Block], after: Sequence[Task]) -> set[int]:
    """Return the ids of the earlier tasks that a new task has to wait for.

    Args:
        reads: blocks that the new task reads; it waits for the last writer of each.
        writes: blocks that the new task writes; for each, it waits for the tasks that have read the block since it was
            last written or, if there are none, for the last writer.
        after: further tasks to wait for.
    """
    earlier = {block.writer.id for block in reads if block.writer is not None}
    earlier |= {task.id for task in after}
    seen: set[int] = {id(block) for block in reads}
    for block in writes:
        earlier |= {reader.id for reader in block.readers}
        if not block.readers and id(block) not in seen and block.writer is not None:
            earlier.add(block.writer.id)
    return earlier

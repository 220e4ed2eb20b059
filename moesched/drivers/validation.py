"""The checking mode: an engine that checks each change of a task's state, and all memory accounts, against the rules.

A `Ledger` checks the accounts of memories (bytes), pools (pages) and views (slots of pages that a kernel reads as one
block). The engine is compared after every call with a plain model of the graph and the lanes (`account.py`). Rules
broken while lanes run, perhaps on other threads, are collected, and raised as an error at the next `submit` or by
`check_over`. So a broken rule never makes a run hang.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from moesched.drivers.account import Account, expected_edges
from moesched.drivers.realtime import SharedEngine
from moesched.engine import Engine, T
from moesched.errors import PolicyError, TaskCancelled, TaskFailed
from moesched.steps.ledger import Ledger
from moesched.steps.memory import Memory, Pool
from moesched.steps.run_state import RunState
from moesched.steps.views import Views
from moesched.tasks import DONE, ISSUED, RUNNING, STATE_NAMES, Block, Collective, Lane, Task

SWITCH = "MOESCHED_VALIDATE"
"""The environment variable that enables checks of every run, if it is set and not 0."""

LEDGER_EVERY = 64
"""Number of submissions between two checks of the ledger of memories and pools."""


class BrokenRule(AssertionError):
    """The engine broke one of its rules: a bug in the engine, not in the policy."""


def switched_on() -> bool:
    """Test whether the checking mode's environment variable asks for checks of every run: it is set, and not 0."""
    return os.environ.get(SWITCH, "") not in ("", "0")


def new_engine(lanes: Iterable[Lane]) -> Engine:
    """Make an engine for a run on the virtual clock; a `CheckedEngine` if checks are `switched_on`."""
    return CheckedEngine(lanes) if switched_on() else Engine(lanes)


def new_shared_engine(lanes: Iterable[Lane]) -> SharedEngine:
    """Make an engine for a run in real time; a `CheckedSharedEngine` if checks are `switched_on`."""
    return CheckedSharedEngine(lanes) if switched_on() else SharedEngine(lanes)


@contextmanager
def watching(run_state: RunState) -> Iterator[None]:
    """Check a run's memories, pools and views within this context, and all rules at its end, even after an error.

    This does nothing unless the run has a `CheckedEngine`.

    Raises:
        BrokenRule: a rule was broken.
    """
    engine, plan = run_state.engine, run_state.plan
    if not isinstance(engine, CheckedEngine):
        yield
        return
    views = [each for stage in run_state.stages for each in stage.views]
    engine.watch(plan.memories.values(), [*plan.weights.pools, *plan.weights.resident], views)
    try:
        yield
    except (PolicyError, TaskFailed, TaskCancelled):
        engine.check_over()
        raise
    engine.check_over()


class CheckedEngine(Engine):
    """An engine that checks itself, for tests and for debugging a policy; about ten times slower than `Engine`.

    Attributes:
        tasks: all tasks in program order.
        broken: descriptions of the rules broken so far.
    """

    def __init__(self, lanes: Iterable[Lane]) -> None:
        super().__init__(lanes)
        self._account = Account(self.lanes)
        self._ledger = Ledger()
        self._failed_since = False
        self.tasks, self.broken = self._account.tasks, self._account.broken

    def watch(
        self,
        memories: Iterable[Memory] = (),
        pools: Iterable[Pool] = (),
        views: Iterable[Views[Any]] = (),
    ) -> None:
        """Check the bytes of these memories, the pages of these pools and the slots of these views as well."""
        self._ledger.add(memories, pools, views)

    # -- the engine's calls, each followed by a comparison with the account ----------------------------

    def submit(
        self,
        task: T,
        reads: Sequence[Block] = (),
        writes: Sequence[Block] = (),
        after: Sequence[Task] = (),
        priority_class: int = 0,
    ) -> T:
        self.check()
        inputs = [block.writer for block in reads if block.writer is not None]
        expected = expected_edges(reads, writes, after)
        super().submit(task, reads, writes, after, priority_class)
        self._account.enter(task, inputs, expected, by_hand=len(after))
        self._compare(task)
        if task.id % LEDGER_EVERY == 0 or self._failed_since:
            # The policy runs here; the ledger is kept in program order, whatever the lanes do meanwhile.
            self._failed_since = False
            self.broken += self._ledger.problems()
        return task

    def cancel(self, task: Task) -> bool:
        before = task.state
        cancelled = super().cancel(task)
        if cancelled and before >= RUNNING:
            self.broken.append(f"{task!r} was withdrawn although it was {STATE_NAMES[before]}")
        self._compare(task)
        return cancelled

    def promote(self, task: Task, priority_class: int) -> None:
        before = task.key
        super().promote(task, priority_class)
        self._account.promote(task, before)

    def finish(self, task: Task, value: object = None) -> None:
        self._account.expect_running(task)
        super().finish(task, value)
        if task.state == ISSUED:
            self._account.await_device(task)
        self._compare(task)

    def fail(self, task: Task, error: BaseException) -> None:
        self._account.expect_running(task)
        super().fail(task, error)
        self._compare(task)
        self._failed_since = True

    def issued(self, task: Task) -> None:
        self._account.expect_running(task)
        super().issued(task)
        self._compare(task, *self._account.issue(task))

    def admit(self, task: Collective) -> None:
        self._account.admit(task)
        super().admit(task)
        self._compare(task)

    def halt(self, cause: BaseException) -> None:
        super().halt(cause)
        self._compare(*self._account.unsettled())

    # -- called by tests and at the end of a run ------------------------------------------------------

    def check(self) -> None:
        """Raise an error if rules were broken.

        Raises:
            BrokenRule: rules were broken; the message names the first few.
        """
        if self.broken:
            raise BrokenRule("; ".join(self.broken[:3]))

    def check_over(self) -> None:
        """Check at a run's end that all tasks have settled, all lanes are idle, and the accounts of memory are right.

        Raises:
            BrokenRule: one of these does not hold, or a rule was broken before.
        """
        unsettled = self._account.unsettled()
        if unsettled:
            self.broken.append(f"never settled: {unsettled[:5]}")
        for lane in self.lanes:
            waiting = [task for _, task in lane.heap] + [task for task in lane.queue if task.state < DONE]
            if lane.running is not None or waiting:
                self.broken.append(f"lane {lane.name} is not empty at the end")
        self.broken += self._ledger.problems()
        self.check()

    def _compare(self, *tasks: Task) -> None:
        """Compare all lanes, and the tasks whose state a call has changed, with the plain model of `account.py`."""
        self._account.look(*tasks)
        settled = self.submitted - len(self._account.open)
        if self.settled != settled:
            self.broken.append("the count of settled tasks is wrong")


class CheckedSharedEngine(SharedEngine, CheckedEngine):
    """A `CheckedEngine` for lanes on other threads: the checks run under the engine's lock."""

"""Real time: lanes as threads, on the loop or awaited; values, failures, interruptions."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from moesched.drivers.realtime import RealtimeDriver
from moesched.drivers.validation import CheckedSharedEngine
from moesched.errors import PolicyError, TaskCancelled, TaskFailed
from moesched.seams import LaneKind
from moesched.tasks import Block, Decision, Discipline, Kernel, Lane, Task
from moesched.work import Work

WORK = Work("test", "cpu")
KINDS: tuple[LaneKind, ...] = ("thread", "guest", "loop", "awaitable")
Body = Callable[[Task], Any]


class Machine:
    """Some lanes in real time, guests some of them; each task does what `bodies` says for its name, if anything."""

    def __init__(
        self,
        *lanes: str,
        kind: LaneKind = "thread",
        guests: tuple[str, ...] = (),
        discipline: Discipline = "ready_first",
        bodies: dict[str, Body] | None = None,
    ) -> None:
        self.lanes = {name: Lane(name, discipline) for name in lanes}
        self.engine = CheckedSharedEngine(self.lanes.values())
        self.done: list[str] = []
        self.bodies = bodies or {}
        execute = self.execute_later if kind == "awaitable" else self.execute
        kinds: dict[str, LaneKind] = dict.fromkeys(lanes, kind)
        kinds |= dict.fromkeys(guests, "guest")
        self.driver = RealtimeDriver([self.engine], execute, kinds=kinds, observers=[self])

    def execute(self, task: Task) -> Any:
        body = self.bodies.get(task.verb)
        return body(task) if body else None

    async def execute_later(self, task: Task) -> Any:
        await asyncio.sleep(0)
        return self.execute(task)

    def ended(self, task: Task) -> None:
        self.done.append(task.verb)

    def submit(
        self, lane: str, name: str, reads: tuple[Block, ...] = (), writes: tuple[Block, ...] = ()
    ) -> Task:
        return self.engine.submit(Decision(self.lanes[lane], WORK, name), reads, writes)

    def run(self, main: Coroutine[Task, Any, Any]) -> Any:
        try:
            (result,) = asyncio.run(self.driver.run(main))
            return result
        finally:
            self.engine.check_over()


@pytest.mark.parametrize("kind", KINDS)
def test_awaiting_each_of_many_tasks_never_misses_an_end(kind: LaneKind) -> None:
    machine = Machine("a", "b", kind=kind, bodies={"task": lambda task: task.id})

    async def policy() -> list[int]:
        return [await machine.submit("ab"[number % 2], "task") for number in range(500)]

    assert machine.run(policy()) == list(range(500))


def test_a_handle_that_ended_long_ago_gives_its_value_at_once() -> None:
    machine = Machine("gpu", bodies={"first": lambda task: "old"})

    async def policy() -> Any:
        first = machine.submit("gpu", "first")
        await machine.submit("gpu", "second")
        return await first, await first

    assert machine.run(policy()) == ("old", "old")


def test_lanes_really_run_beside_each_other() -> None:
    meeting = threading.Barrier(2)
    machine = Machine("gpu", "cpu", bodies={"meet": lambda task: meeting.wait(30)})

    async def policy() -> None:
        machine.submit("gpu", "meet")
        machine.submit("cpu", "meet")

    machine.run(policy())
    assert machine.done == ["meet", "meet"]


def test_a_guest_and_what_follows_run_on_the_thread_that_let_the_guest_start() -> None:
    threads: list[int] = []
    submitted = threading.Event()

    def note(task: Task) -> None:
        submitted.wait(30)
        threads.append(threading.get_ident())

    machine = Machine("gpu", "network", guests=("network",), bodies={"note": note})
    block = Block("x")

    async def policy() -> None:
        for number in range(20):
            machine.submit(("gpu", "network")[number % 2], "note", (block,), (block,))
        submitted.set()

    machine.run(policy())
    assert len(threads) == 20
    assert len(set(threads)) == 1


def test_a_lane_whose_thread_has_a_guest_goes_on_beside_it() -> None:
    there, meeting = threading.Event(), threading.Barrier(2)

    def exchange(task: Task) -> None:
        there.set()
        meeting.wait(30)

    machine = Machine(
        "gpu",
        "network",
        "disk",
        guests=("network",),
        bodies={
            "exchange": exchange,
            "read": lambda task: there.wait(30),
            "compute": lambda task: meeting.wait(30),
        },
    )
    sums, page = Block("sums"), Block("page")

    async def policy() -> None:
        machine.submit("gpu", "sum", (), (sums,))
        exchanged = machine.submit("network", "exchange", (sums,), (sums,))
        machine.submit("disk", "read", (), (page,))
        await machine.submit("gpu", "compute", (page,))
        await exchanged

    machine.run(policy())
    assert sorted(machine.done) == ["compute", "exchange", "read", "sum"]


def test_times_are_those_of_the_clock_that_is_given() -> None:
    ticks = iter(range(1000, 2000, 7))
    lane = Lane("gpu")
    engine = CheckedSharedEngine([lane])
    driver = RealtimeDriver([engine], lambda task: None, clock=lambda: next(ticks))

    async def policy() -> list[Kernel]:
        tasks = [engine.submit(Kernel(lane, WORK, "kernel")) for _ in range(3)]
        await tasks[-1]
        return tasks

    (tasks,) = asyncio.run(driver.run(policy()))
    assert [(task.start, task.end) for task in tasks] == [(7, 14), (21, 28), (35, 42)]
    assert lane.busy == 21


# -- what goes wrong -------------------------------------------------------------------------------


def broken(task: Task) -> None:
    raise OSError("disk gone")


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_that_raises_comes_back_with_its_story(kind: LaneKind) -> None:
    machine = Machine("disk", "gpu", kind=kind, bodies={"fetch": broken})
    page = Block("page")

    async def policy() -> None:
        machine.submit("disk", "fetch", (), (page,))
        await machine.submit("gpu", "expert", (page,))

    with pytest.raises(
        TaskFailed, match=r"fetch failed on lane disk after waiting for nothing.*disk gone"
    ) as caught:
        machine.run(policy())
    assert isinstance(caught.value.__cause__, OSError)
    assert machine.done == ["fetch"]


def test_even_a_task_that_tries_to_leave_the_thread_ends_as_a_failure() -> None:
    def leaves(task: Task) -> None:
        raise SystemExit(3)

    machine = Machine("gpu", bodies={"leave": leaves})

    async def policy() -> None:
        await machine.submit("gpu", "leave")

    with pytest.raises(TaskFailed, match="SystemExit"):
        machine.run(policy())


def test_a_policy_that_has_not_stopped_is_stopped_at_its_next_submission() -> None:
    machine = Machine("gpu", "cpu", bodies={"fetch": broken})
    block = Block("x")
    submitted: list[int] = []

    async def policy() -> None:
        machine.submit("gpu", "fetch", (), (block,))
        await machine.submit("cpu", "other", (), (block,))
        submitted.append(1)
        machine.submit("gpu", "never")
        submitted.append(2)

    with pytest.raises(TaskFailed, match="fetch failed"):
        machine.run(policy())
    assert submitted == [1]


def test_an_error_of_the_policy_cancels_what_has_not_started() -> None:
    machine, go_on = held()
    waiting: list[Task] = []

    async def policy() -> None:
        machine.submit("gpu", "running")
        waiting.append(machine.submit("gpu", "waiting"))
        asyncio.get_running_loop().call_soon(go_on.set)
        raise PolicyError("a mistake")

    with pytest.raises(PolicyError, match="a mistake"):
        machine.run(policy())
    assert machine.done == ["running"]
    assert isinstance(waiting[0].cause, PolicyError)


class FullDisk(Machine):
    """A machine whose observer cannot note what it is told."""

    def ended(self, task: Task) -> None:
        super().ended(task)
        raise OSError("no space left for the trace")


@pytest.mark.parametrize("kind", KINDS)
def test_an_observer_that_raises_ends_the_run_with_its_error(kind: LaneKind) -> None:
    machine = FullDisk("gpu", "link", kind=kind)
    block = Block("x")

    async def policy() -> None:
        for number in range(10):
            await machine.submit(("gpu", "link")[number % 2], f"{number}", (block,), (block,))

    with pytest.raises(OSError, match="no space left for the trace"):
        machine.run(policy())
    assert machine.done == ["0"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_more_starts_after_an_observer_raised(kind: LaneKind) -> None:
    ran: list[str] = []
    names = ("first", "second", "third")
    machine = FullDisk("gpu", kind=kind, bodies=dict.fromkeys(names, lambda task: ran.append(task.verb)))
    block = Block("x")

    async def policy() -> None:
        for name in names:
            machine.submit("gpu", name, (block,), (block,))

    with pytest.raises(OSError, match="no space left for the trace"):
        machine.run(policy())
    assert "first" in ran and "third" not in ran


def held() -> tuple[Machine, threading.Event]:
    """A machine whose task `running` ends once the event is set."""
    go_on = threading.Event()
    return Machine("gpu", bodies={"running": lambda task: go_on.wait(30)}), go_on


def interrupted(
    machine: Machine, policy: Callable[[Callable[[], object]], Coroutine[Task, Any, None]]
) -> None:
    """Run a policy that is given a way to interrupt the run."""

    async def main() -> None:
        me = asyncio.current_task()
        assert me is not None
        await machine.driver.run(policy(me.cancel))

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    machine.engine.check_over()


def test_an_interruption_waits_for_what_runs_and_withdraws_the_rest() -> None:
    machine, go_on = held()

    async def policy(interrupt: Callable[[], object]) -> None:
        machine.submit("gpu", "running")
        last = machine.submit("gpu", "waiting")
        interrupt()
        try:
            await last
        finally:  # the driver closes a policy after it has withdrawn what has not started
            go_on.set()

    interrupted(machine, policy)
    assert machine.done == ["running"]


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_interruption_cancels_what_only_waits_on_the_loop(has_begun: bool) -> None:
    machine = Machine("arrivals", kind="awaitable")
    interrupts: list[Callable[[], object]] = []

    async def for_ever(task: Task) -> None:
        if has_begun:
            interrupts[0]()
        await asyncio.Event().wait()

    async def policy(interrupt: Callable[[], object]) -> None:
        interrupts.append(interrupt)
        waiting = machine.submit("arrivals", "wait")
        if not has_begun:
            interrupt()
        await waiting

    machine.driver = RealtimeDriver([machine.engine], for_ever, kinds={"arrivals": "awaitable"})
    interrupted(machine, policy)


def test_an_interrupted_policy_may_clean_up() -> None:
    machine, go_on = held()
    late: list[Task] = []

    async def policy(interrupt: Callable[[], object]) -> None:
        running = machine.submit("gpu", "running")
        interrupt()
        asyncio.get_running_loop().call_later(0.01, go_on.set)
        try:
            await running
        finally:
            late.append(machine.submit("gpu", "clean up"))

    interrupted(machine, policy)
    assert isinstance(late[0].cause, TaskCancelled)


def test_a_second_interruption_waits_for_what_runs_too() -> None:
    go_on = threading.Event()
    ended_by_loop: list[bool] = []
    machine = Machine("gpu", bodies={"running": lambda task: ended_by_loop.append(go_on.wait(30))})

    async def policy(interrupt: Callable[[], object]) -> None:
        running = machine.submit("gpu", "running")
        interrupt()
        try:
            await running
        finally:  # the driver, which was interrupted, begins to wait
            asyncio.get_running_loop().call_soon(interrupt)
            asyncio.get_running_loop().call_later(0.01, go_on.set)

    interrupted(machine, policy)
    assert ended_by_loop == [True]


def test_a_policy_that_awaits_while_it_is_given_up_does_not_keep_the_lanes_from_stopping() -> None:
    machine, go_on = held()

    async def policy(interrupt: Callable[[], object]) -> None:
        running = machine.submit("gpu", "running")
        interrupt()
        asyncio.get_running_loop().call_later(0.01, go_on.set)
        try:
            await running
        finally:
            await running

    interrupted(machine, policy)


def test_no_thread_is_left_behind() -> None:
    before = set(threading.enumerate())
    machine = Machine("gpu", "cpu", "link")

    async def policy() -> None:
        machine.submit("gpu", "task")

    machine.run(policy())
    assert set(threading.enumerate()) == before

"""The virtual clock: what runs when, what a policy may do there, and how tasks share a resource."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.drivers.pricing import no_garbage_collection
from moesched.drivers.sharing import fair_rates
from moesched.drivers.validation import CheckedEngine
from moesched.drivers.virtual import VirtualDriver
from moesched.errors import BadInput, PolicyError, TaskCancelled, TaskFailed
from moesched.seams import Demand
from moesched.tasks import DEMAND, IDLE, Block, Decision, Discipline, Kernel, Lane, PageTransfer, Task
from moesched.work import Work

GARBAGE = """
import weakref
from moesched.drivers.pricing import FULL, MANY, no_garbage_collection

class Cycle:
    def __init__(self):
        self.own = self

cycle = Cycle()
gone = weakref.ref(cycle)
with no_garbage_collection():
    made = [[] for _ in range(2 * MANY)]
del cycle, made
for _ in range(FULL // MANY):
    with no_garbage_collection():
        made = [[] for _ in range(MANY + 1000)]
    del made
assert gone() is None
"""


class Seconds:
    """Work takes as many seconds as it has FLOPs, and wants these shares of resources."""

    def __init__(self, **shares: float) -> None:
        self.shares = tuple(shares.items())

    def work(self, work: Work) -> Demand:
        return Demand(work.flops, self.shares)


class Clock:
    """A virtual machine with some lanes, and the tasks that ended on it."""

    def __init__(self, *names: str, discipline: Discipline = "ready_first", **options: Any) -> None:
        self.lanes = {name: Lane(name, discipline) for name in names}
        self.engine = CheckedEngine(self.lanes.values())
        self.done: list[Task] = []
        self.driver = VirtualDriver([self.engine], Seconds(), observers=[self], **options)

    def ended(self, task: Task) -> None:
        self.done.append(task)

    def kernel(self, lane: str, seconds: float, name: str = "kernel", *, kind: type[Task] = Kernel) -> Task:
        return kind(self.lanes[lane], Work("kernel", lane, seconds), name)

    def submitted(self, *tasks: tuple[str, float, str]) -> Clock:
        """The clock when tasks have run that need nothing of each other: lane, seconds, name."""

        async def policy() -> None:
            for task in tasks:
                self.engine.submit(self.kernel(*task))

        self.driver.run(policy())
        return self

    def spans(self) -> dict[str, tuple[float, float]]:
        """The times of each task, in seconds."""
        return {task.verb: (task.start / 1e9, task.end / 1e9) for task in self.done}


def test_lanes_run_beside_each_other_and_tasks_on_a_lane_behind_each_other() -> None:
    clock = Clock("gpu", "cpu").submitted(("gpu", 2, "one"), ("gpu", 3, "two"), ("cpu", 4, "other"))
    assert clock.spans() == {"one": (0, 2), "two": (2, 5), "other": (0, 4)}
    assert clock.driver.now == 5_000_000_000
    clock.engine.check_over()


def test_a_reader_starts_at_the_moment_at_which_its_writer_ends() -> None:
    clock = Clock("gpu", "link")
    weights = Block("w")

    async def policy() -> None:
        clock.engine.submit(clock.kernel("link", 2, "fetch"), (), (weights,))
        clock.engine.submit(clock.kernel("gpu", 1, "matmul"), (weights,))

    clock.driver.run(policy())
    assert clock.spans() == {"fetch": (0, 2), "matmul": (2, 3)}


@pytest.mark.parametrize("sharing", [False, True])
def test_what_a_policy_submits_after_an_await_starts_later_by_a_time_for_the_number_of_tasks(
    sharing: bool,
) -> None:
    clock = Clock("gpu", "link", after_await=lambda tasks: tasks / 4, sharing=sharing)

    async def policy() -> None:
        routed = clock.engine.submit(clock.kernel("gpu", 2, "route"))
        clock.engine.submit(clock.kernel("link", 3, "fetch"))
        await routed
        for name in ("expert", "other expert"):
            clock.engine.submit(clock.kernel("gpu", 1, name))

    clock.driver.run(policy())
    assert clock.spans() == {
        "route": (0, 2),
        "fetch": (0, 3),
        "expert": (2.5, 3.5),
        "other expert": (3.5, 4.5),
    }


def test_awaiting_a_handle_gives_its_value_at_the_moment_of_its_end() -> None:
    clock = Clock("gpu", perform={Decision: lambda task: {3: 5}})
    seen = []

    async def policy() -> str:
        seen.append(await clock.engine.submit(clock.kernel("gpu", 7, kind=Decision)))
        seen.append(clock.driver.now)
        return "result"

    assert clock.driver.run(policy()) == ["result"]
    assert seen == [{3: 5}, 7_000_000_000]


def test_awaiting_a_handle_that_has_ended_takes_no_time() -> None:
    clock = Clock("gpu")

    async def policy() -> None:
        first = clock.engine.submit(clock.kernel("gpu", 1))
        await clock.engine.submit(clock.kernel("gpu", 1))
        await first
        assert clock.driver.now == 2_000_000_000

    clock.driver.run(policy())


def test_what_is_submitted_after_an_await_starts_no_earlier() -> None:
    clock = Clock("gpu", "cpu")

    async def policy() -> None:
        await clock.engine.submit(clock.kernel("gpu", 2))
        clock.engine.submit(clock.kernel("cpu", 1, "after"))

    clock.driver.run(policy())
    assert clock.spans()["after"] == (2, 3)


def test_tasks_that_end_together_end_in_the_order_of_their_lanes() -> None:
    clock = Clock("a", "b").submitted(("b", 1, "on b"), ("a", 1, "on a"))
    assert [task.verb for task in clock.done] == ["on a", "on b"]


def test_no_task_takes_less_than_a_nanosecond() -> None:
    assert Clock("gpu").submitted(*[("gpu", 0, "kernel")] * 3).driver.now == 3


def test_an_urgent_transfer_overtakes_but_does_not_interrupt() -> None:
    clock = Clock("link")

    async def policy() -> None:
        for name, urgency in (("running", IDLE), ("idle", IDLE), ("demand", DEMAND)):
            task = clock.kernel("link", 1, name, kind=PageTransfer)
            clock.engine.submit(task, (), (), (), urgency)

    clock.driver.run(policy())
    assert [task.verb for task in clock.done] == ["running", "demand", "idle"]


# -- what goes wrong -------------------------------------------------------------------------------


def test_a_policy_that_awaits_a_stranger_is_told_which() -> None:
    class Stranger:
        def __await__(self) -> Generator[str, None, None]:
            yield "a letter"

    clock = Clock("gpu")

    async def policy() -> None:
        await Stranger()

    with pytest.raises(PolicyError, match="not 'a letter'"):
        clock.driver.run(policy())


def test_an_error_of_the_policy_comes_out_with_its_own_line() -> None:
    clock = Clock("gpu")

    async def policy() -> None:
        clock.engine.submit(clock.kernel("gpu", 1))
        raise PolicyError("a mistake")

    with pytest.raises(PolicyError, match="a mistake") as caught:
        clock.driver.run(policy())
    assert str(caught.traceback[-1].path) == __file__
    clock.engine.check_over()


def test_a_task_that_fails_raises_at_the_await() -> None:
    def fails(task: Task) -> None:
        raise ValueError("no such expert")

    clock = Clock("gpu", perform={Decision: fails})

    async def policy() -> None:
        await clock.engine.submit(clock.kernel("gpu", 1, "route", kind=Decision))

    with pytest.raises(TaskFailed, match=r"route failed on lane gpu .*no such expert"):
        clock.driver.run(policy())
    clock.engine.check_over()


def test_awaiting_what_a_failure_cancelled_raises_the_failure() -> None:
    def fails(task: Task) -> None:
        raise ValueError("disk gone")

    clock = Clock("gpu", "disk", perform={PageTransfer: fails})
    page = Block("page")

    async def policy() -> None:
        clock.engine.submit(clock.kernel("disk", 1, "fetch", kind=PageTransfer), (), (page,))
        await clock.engine.submit(clock.kernel("gpu", 1), (page,))

    with pytest.raises(TaskFailed, match="fetch failed"):
        clock.driver.run(policy())


def test_a_policy_may_go_on_after_cancelling_what_it_awaits() -> None:
    clock = Clock("gpu", "link")
    caught = []

    async def policy() -> None:
        clock.engine.submit(clock.kernel("link", 5, "running"))
        prefetch = clock.engine.submit(clock.kernel("link", 1, "prefetch"))
        clock.engine.cancel(prefetch)
        try:
            await prefetch
        except TaskCancelled as error:
            caught.append(str(error))
        await clock.engine.submit(clock.kernel("gpu", 1))

    clock.driver.run(policy())
    assert caught == ["prefetch was cancelled before it started"]
    assert clock.spans() == {"kernel": (0, 1), "running": (0, 5)}


def test_work_without_a_cost_is_refused() -> None:
    class Unknown:
        def work(self, work: Work) -> Demand:
            raise BadInput(f"no cost for {work.kind}")

    lane = Lane("gpu")
    engine = CheckedEngine([lane])
    driver = VirtualDriver([engine], Unknown())

    async def policy() -> None:
        engine.submit(Kernel(lane, Work("mystery", "gpu"), "kernel"))

    with pytest.raises(BadInput, match="no cost for mystery"):
        driver.run(policy())


def test_each_rank_has_a_policy_of_its_own_on_one_clock() -> None:
    engines = [CheckedEngine([Lane("gpu")]) for _ in range(3)]
    driver = VirtualDriver(engines, Seconds())

    async def policy(rank: int) -> int:
        await engines[rank].submit(Kernel(engines[rank].lanes[0], Work("kernel", "gpu", rank + 1), "kernel"))
        return driver.now

    assert driver.run(*(policy(rank) for rank in range(3))) == [1_000_000_000, 2_000_000_000, 3_000_000_000]


def test_a_pause_of_the_garbage_collector_for_few_objects_does_not_set_its_counts_back() -> None:
    gc.collect()
    gc.collect(1)  # counts as one collection of the young before the next full one
    before = gc.get_count()[2]
    with no_garbage_collection():
        [[] for _ in range(100)]
    assert gc.get_count()[2] >= before > 0


def test_garbage_is_collected_although_many_objects_become_old_at_once() -> None:
    """In a process of its own, where nothing is frozen."""
    subprocess.run([sys.executable, "-c", GARBAGE], check=True, timeout=60)


# -- shared resources ------------------------------------------------------------------------------

SECOND = 1_000_000_000


def wants(**shares: float) -> Demand:
    return Demand(1.0, tuple(shares.items()))


@pytest.mark.parametrize(
    ("shares", "rates"),
    [
        ([{"memory": 0.5}, {"memory": 0.5}, {"link": 1.0}], (1, 1, 1)),
        ([{"memory": 1.0}, {"memory": 1.0}], (0.5, 0.5)),
        ([{"memory": 1.0}, {"memory": 0.25}], (0.8, 0.8)),
        ([{"link": 1.0, "memory": 0.5}, {"link": 1.0}, {"memory": 1.0}], (0.5, 0.5, 0.75)),
        ([{"memory": 1.0}, {"memory": 1.0}, {}], (0.5, 0.5, 1)),
        ([{"memory": 0.0}, {"memory": 0.0}], (1, 1)),
    ],
    ids=[
        "tasks that leave enough for each other run at full speed",
        "two that want all get half each",
        "one that wants little is slowed no more than one that wants much",
        "what a task that is held elsewhere leaves goes to the others",
        "a task that wants nothing is never slowed",
        "a share that rounds to nothing holds nobody up",
    ],
)
def test_rates_are_fair(shares: list[dict[str, float]], rates: tuple[float, ...]) -> None:
    assert fair_rates([wants(**each) for each in shares]) == pytest.approx(rates)


demands = st.lists(
    st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.0, 0.001, 0.1, 0.3, 0.5, 0.999, 1.0])),
    min_size=1,
    max_size=6,
)


def used_by(shares: Sequence[Mapping[str, float]], rates: Sequence[float]) -> dict[str, float]:
    """The use of each resource by tasks that run at these rates."""
    return {
        name: sum(rate * each.get(name, 0) for rate, each in zip(rates, shares, strict=True))
        for name in "abc"
    }


@given(demands)
def test_nothing_is_used_beyond_what_there_is_and_nobody_could_go_faster(
    shares: list[dict[str, float]],
) -> None:
    rates = fair_rates([wants(**each) for each in shares])
    used = used_by(shares, rates)
    assert all(total <= 1 + 1e-9 for total in used.values())
    for rate, each in zip(rates, shares, strict=True):
        full = [name for name, share in each.items() if share > 0 and used[name] > 1 - 1e-9]
        assert rate == pytest.approx(1) or full, "something could run faster"


@given(demands)
def test_where_a_resource_holds_tasks_none_that_uses_it_is_faster_than_those_it_holds(
    shares: list[dict[str, float]],
) -> None:
    rates = fair_rates([wants(**each) for each in shares])
    used = used_by(shares, rates)
    for rate, each in zip(rates, shares, strict=True):
        if rate < 1 - 1e-9:
            rivals = [
                max(r for r, other in zip(rates, shares, strict=True) if other.get(name, 0) > 0)
                for name, share in each.items()
                if share > 0 and used[name] > 1 - 1e-9
            ]
            assert min(rivals) == pytest.approx(rate), (
                "max-min: it is among the fastest on the resource that holds it"
            )


# -- on the clock ----------------------------------------------------------------------------------


def ends(*lengths: tuple[str, float]) -> dict[str, int]:
    """The ends of tasks of these lanes and lengths that share a memory."""
    lanes = {name: Lane(name) for name, _ in lengths}
    engine = CheckedEngine(lanes.values())
    driver = VirtualDriver([engine], Seconds(memory=1.0), sharing=True)

    async def policy() -> list[Kernel]:
        return [
            engine.submit(Kernel(lanes[name], Work(f"{name} {number}", name, seconds), f"{name} {number}"))
            for number, (name, seconds) in enumerate(lengths)
        ]

    (tasks,) = driver.run(policy())
    engine.check_over()
    return {task.verb: task.end for task in tasks}


def test_two_lanes_that_share_a_memory_take_twice_as_long() -> None:
    assert ends(("gpu", 1.0), ("cpu", 1.0)) == {"gpu 0": 2 * SECOND, "cpu 1": 2 * SECOND}


def test_the_one_that_is_left_goes_on_at_full_speed() -> None:
    assert ends(("gpu", 1.0), ("cpu", 3.0)) == {"gpu 0": 2 * SECOND, "cpu 1": 4 * SECOND}


def test_a_task_that_comes_later_shares_from_then_on() -> None:
    result = ends(("gpu", 2.0), ("cpu", 1.0), ("cpu", 0.5))
    assert result == {"cpu 1": 2 * SECOND, "cpu 2": 3 * SECOND, "gpu 0": 3 * SECOND + SECOND // 2}


@given(
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from([0.1, 0.5, 1.0, 2.5])),
        min_size=1,
        max_size=8,
    )
)
def test_a_shared_memory_is_busy_until_all_its_work_is_done(lengths: list[tuple[str, float]]) -> None:
    total = sum(seconds for _, seconds in lengths)
    assert max(ends(*lengths).values()) == pytest.approx(total * SECOND, abs=len(lengths) * 2)

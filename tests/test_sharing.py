"""Sharing: tasks that run at once and want more of a resource than there is slow each other down, max-min fairly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.drivers.sharing import fair_rates
from moesched.drivers.validation import CheckedEngine
from moesched.drivers.virtual import VirtualDriver
from moesched.seams import Demand
from moesched.tasks import Kernel, Lane, Work

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


class Memory:
    """A second each, alone; every task wants all of the memory's bandwidth."""

    def work(self, work: Work) -> Demand:
        return Demand(work.flops, (("memory", 1.0),))


def ends(*lengths: tuple[str, float]) -> dict[str, int]:
    """The ends of tasks of these lanes and lengths that share a memory."""
    lanes = {name: Lane(name) for name, _ in lengths}
    engine = CheckedEngine(lanes.values())
    driver = VirtualDriver([engine], Memory(), sharing=True)

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

"""Ranks meet for collectives: when one starts, when it cannot, and who is told."""

from __future__ import annotations

import asyncio
import re
from functools import partial
from typing import Any, NoReturn

import numpy as np
import pytest

from engine_script import WORK, Script, meet
from meshes import at_once
from moesched.drivers.realtime import RealtimeDriver
from moesched.drivers.rendezvous import Rendezvous
from moesched.drivers.validation import CheckedEngine, CheckedSharedEngine
from moesched.drivers.virtual import VirtualDriver
from moesched.errors import PolicyError, TaskCancelled, TaskFailed, TransportError
from moesched.seams import Exchange
from moesched.tasks import Block, Collective, Discipline, Kernel, Lane, Task
from moesched.transports.inproc import InprocTransport
from traces import Free

ONE = np.ones(1, np.float32)


def two_ranks(
    discipline: Discipline = "ready_first", **lanes: Discipline
) -> tuple[Script, Script, Rendezvous]:
    first, second = (Script(net=discipline, **lanes) for _ in range(2))
    return first, second, meet(first, second)


# -- the rendezvous --------------------------------------------------------------------------------


def test_a_collective_starts_on_all_ranks_once_the_last_one_has_arrived() -> None:
    first, second, ranks = two_ranks()
    first.collective("sum", "net")
    ranks.collect()
    assert first.started() == []
    second.collective("sum", "net")
    ranks.collect()
    assert (first.started(), second.started()) == (["sum"], ["sum"])


def test_a_rank_arrives_when_its_part_of_the_data_is_there() -> None:
    first, second, ranks = two_ranks(gpu="ready_first")
    first.collective("sum", "net")
    second.submit("expert", "gpu", writes="x")
    second.collective("sum", "net", reads="x")
    ranks.collect()
    assert (first.started(), second.started()) == ([], ["expert"])
    second.finish("expert")
    ranks.collect()
    assert (first.started(), second.started()) == (["sum"], ["sum"])


@pytest.mark.parametrize("discipline", ["in_order", "ready_first"])
def test_a_collective_that_waits_for_other_ranks_does_not_slip_into_a_free_lane(
    discipline: Discipline,
) -> None:
    first, second, ranks = two_ranks(discipline)
    first.submit("send", "net")
    first.collective("sum", "net")
    ranks.collect()
    first.finish("send")
    assert first.started() == ["send"]
    second.collective("sum", "net")
    ranks.collect()
    assert first.started() == ["sum"]


def test_other_tasks_use_the_lane_while_a_collective_waits_for_other_ranks() -> None:
    first, _, ranks = two_ranks()
    first.collective("sum", "net")
    ranks.collect()
    first.submit("send", "net")
    assert first.started() == ["send"]


def test_admitted_collectives_take_ready_first_lanes_in_the_same_order_on_all_ranks() -> None:
    first, second, ranks = two_ranks(gpu="ready_first")
    second.submit("send", "net")
    for script in (first, second):
        script.submit("expert", "gpu", writes="x")
        script.collective("early", "net", reads="x")
        script.collective("late", "net")
    ranks.collect()
    assert first.started() == ["expert", "late"]
    first.finish("expert")
    second.finish("expert")
    ranks.collect()
    second.finish("send")
    assert second.started() == ["send", "expert", "late"], "rank 0 waits for rank 1 in `late`, not in `early`"


def test_ranks_that_say_different_things_are_told_what_each_said() -> None:
    first, second, ranks = two_ranks()
    task = first.collective("sum", "net", says="sum of 3 floats")
    second.collective("sum", "net", says="sum of 4 floats")
    ranks.collect()
    assert (first.state("sum"), second.state("sum")) == ("cancelled", "cancelled")
    assert isinstance(task.cause, PolicyError)
    assert "rank 0: sum of 3 floats; rank 1: sum of 4 floats" in str(task.cause)


def test_a_rank_alone_waits_for_no_others() -> None:
    alone = Script(net="in_order")
    ranks = meet(alone)
    alone.collective("sum", "net")
    ranks.collect()
    assert alone.started() == ["sum"]


def test_a_collective_of_a_rank_alone_can_be_cancelled_before_it_is_admitted() -> None:
    alone = Script(net="in_order")
    ranks = meet(alone)
    alone.collective("sum", "net")
    assert alone.cancel("sum")
    ranks.collect()
    assert (alone.state("sum"), alone.started()) == ("cancelled", [])
    alone.engine.check_over()


def test_a_cancelled_collective_is_cancelled_on_the_ranks_that_are_there_and_on_those_that_come() -> None:
    first, second, third = Script(net="ready_first"), Script(net="in_order"), Script(net="ready_first")
    ranks = meet(first, second, third)
    first.collective("sum", "net")
    second.collective("sum", "net")
    ranks.collect()
    assert first.cancel("sum")
    ranks.collect()
    third.collective("sum", "net")
    ranks.collect()
    assert [script.state("sum") for script in (first, second, third)] == ["cancelled"] * 3
    for script in (first, second, third):
        script.engine.check_over()


def test_an_admitted_collective_counts_as_started_since_the_other_ranks_rely_on_it() -> None:
    first, second, ranks = two_ranks()
    first.submit("send", "net")
    first.collective("sum", "net")
    second.collective("sum", "net")
    ranks.collect()
    assert not first.cancel("sum")
    first.engine.halt(TaskCancelled("stopped"))
    first.finish("send")
    assert first.started() == ["send", "sum"]


def test_a_rank_whose_input_failed_takes_the_others_with_it() -> None:
    first, second, ranks = two_ranks(gpu="ready_first")
    second.collective("sum", "net")
    first.submit("expert", "gpu", writes="x")
    first.collective("sum", "net", reads="x")
    ranks.collect()
    first.fail("expert")
    ranks.collect()
    assert (first.state("sum"), second.state("sum")) == ("cancelled", "cancelled")


def test_a_rank_that_ended_early_is_named_to_those_who_wait_for_it() -> None:
    first, _, ranks = two_ranks()
    task = first.collective("sum", "net")
    ranks.collect()
    ranks.leave(1, None)
    assert first.state("sum") == "cancelled"
    assert "rank 1 ended without a part in it" in str(task.cause)
    first.collective("sum again", "net")
    ranks.collect()
    assert first.state("sum again") == "cancelled"


def test_a_rank_that_ended_well_still_takes_part_in_what_it_submitted() -> None:
    first, second, ranks = two_ranks()
    second.collective("sum", "net")
    ranks.collect()
    ranks.leave(1, None)
    first.collective("sum", "net")
    ranks.collect()
    assert (first.started(), second.started()) == (["sum"], ["sum"])


def test_a_refused_collective_is_not_waited_for() -> None:
    first, second, ranks = two_ranks()
    second.submit("kernel", "net")
    second.fail("kernel")
    with pytest.raises(TaskFailed):
        second.collective("sum", "net")
    ranks.leave(1, second.engine.failure)
    first.collective("sum", "net")
    ranks.collect()
    assert first.state("sum") == "cancelled"


# -- through the drivers ---------------------------------------------------------------------------


async def reducing(engine: CheckedEngine, sends: bool, values: list[Any]) -> None:
    """A rank's program: a task of its own at a time of its own, then a sum, then a wait for it."""
    (lane,) = engine.lanes
    block = Block("x")
    if sends:
        engine.submit(Kernel(lane, WORK, "send"), (), (block,))
    values.append(await engine.collective(Collective(lane, WORK, "sum"), (block,), (block,)))


def test_ranks_meet_on_the_virtual_clock() -> None:
    engines = [CheckedEngine([Lane("net", "in_order")]) for _ in range(3)]
    values: list[Any] = []
    driver = VirtualDriver(engines, Free(), perform={Collective: lambda task: f"what {task.verb} came to"})
    driver.run(*(reducing(engine, rank > 0, values) for rank, engine in enumerate(engines)))
    assert values == ["what sum came to"] * 3
    for engine in engines:
        engine.check_over()


def test_ranks_on_threads_sum_tensors_in_the_order_of_the_ranks() -> None:
    transport = InprocTransport(3)
    engines = [CheckedSharedEngine([Lane("net", "in_order")]) for _ in range(3)]
    rank_of = {engine.lanes[0]: rank for rank, engine in enumerate(engines)}
    parts = np.array([[1e8], [1.0], [-1e8]], np.float32)

    def execute(task: Task) -> Any:
        rank = rank_of[task.lane]
        if isinstance(task, Collective):
            return transport.all_reduce(rank, Exchange(task.ticket, task.signature), parts[rank])
        return None

    values: list[Any] = []
    driver = RealtimeDriver(engines, execute)
    asyncio.run(driver.run(*(reducing(engine, rank > 0, values) for rank, engine in enumerate(engines))))
    assert [value.item() for value in values] == [((parts[0] + parts[1]) + parts[2]).item()] * 3


def test_a_policy_error_on_one_rank_ends_the_others_with_it() -> None:
    engines = [CheckedSharedEngine([Lane("net")]) for _ in range(2)]

    async def gives_up() -> None:
        raise PolicyError("enough")

    driver = RealtimeDriver(engines, lambda task: None)
    with pytest.raises((PolicyError, TaskCancelled), match="enough"):
        asyncio.run(driver.run(reducing(engines[0], True, []), gives_up()))
    for engine in engines:
        engine.check_over()


def test_a_rank_that_groups_its_errors_does_not_hide_the_error_of_another_rank() -> None:
    engines = [CheckedEngine([Lane("net")]) for _ in range(2)]

    async def gathers() -> None:
        try:
            await reducing(engines[0], True, [])
        except TaskCancelled as error:
            raise ExceptionGroup("of the children", [error]) from error

    async def gives_up() -> None:
        raise PolicyError("enough")

    with pytest.raises(PolicyError, match="enough"):
        VirtualDriver(engines, Free()).run(gathers(), gives_up())


# -- the transport ---------------------------------------------------------------------------------


def test_a_rank_that_does_not_come_in_time_is_named() -> None:
    transport = InprocTransport(3, timeout_seconds=0.01)
    with pytest.raises(TransportError, match=r"rank 0, 2 did not come in 0\.01 s"):
        transport.all_reduce(1, Exchange(0), ONE)


class NoMemory(np.ndarray[Any, Any]):
    """An array that cannot be added."""

    def __add__(self, other: object) -> NoReturn:
        raise MemoryError("no room for a sum")


def test_an_error_of_the_rank_that_adds_is_told_to_those_who_wait() -> None:
    transport = InprocTransport(3)
    part = ONE.view(NoMemory)
    ended = at_once(*(partial(transport.all_reduce, rank, Exchange(0), part) for rank in range(3)))
    told = [each for each in ended if isinstance(each, TransportError)]
    assert [type(each) for each in ended if each not in told] == [MemoryError]
    assert len(told) == 2
    assert all(re.search(r"rank \d gave up: MemoryError\('no room for a sum'\)", str(each)) for each in told)


def test_a_rank_that_comes_twice_is_refused() -> None:
    transport = InprocTransport(2)
    transport.abandon(1, Exchange(7), "no")
    with pytest.raises(TransportError, match="rank 1 of 2 came twice"):
        transport.all_reduce(1, Exchange(7), ONE)

"""Memories: budgets, pools of slots, views of pages."""

from __future__ import annotations

import pytest

from engine_script import Script
from moesched.drivers.validation import BrokenRule
from moesched.errors import NotResident, OverBudget, PolicyError, TaskFailed
from moesched.steps.fixed_pages import FixedPages
from moesched.steps.ledger import ledger_problems
from moesched.steps.memory import Memory, Replacement, slots_of
from moesched.steps.views import Views
from page_bench import PAGES, Bench

# -- budgets ---------------------------------------------------------------------------------------


def test_a_budget_says_how_many_bytes_are_missing() -> None:
    memory = Memory("host", 1000)
    memory.reserve("KV cache", 400)
    with pytest.raises(
        OverBudget, match="weights needs 700 bytes of host, which has 600 free of its budget of 1,000"
    ):
        memory.reserve("weights", 700)
    assert (memory.used, memory.peak) == (400, 400)


# -- pools -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("replacement", "held"), [("ring", [1, 2]), ("lru", [0, 2])])
def test_a_ring_replaces_the_page_that_came_first_and_lru_the_one_that_was_used_longest_ago(
    replacement: Replacement, held: list[int]
) -> None:
    bench = Bench(slots=2, replacement=replacement)
    bench.fetch(0)
    bench.fetch(1)
    bench.read(0)
    bench.fetch(2)
    assert bench.held() == held
    bench.check()


def test_a_pool_that_replaces_nothing_asks_for_an_eviction() -> None:
    bench = Bench(slots=1, replacement="none")
    bench.fetch(0)
    with pytest.raises(
        OverBudget, match=r"pool weights in gpu is full .* evict a page before moving L0 E1 #0 there"
    ):
        bench.fetch(1)
    bench.evict(0)
    bench.fetch(1)
    assert bench.held() == [1]
    bench.check()


def test_a_page_is_named_once_even_for_the_slot_of_one_that_never_came() -> None:
    bench = Bench(slots=1)
    bench.fetch_in_vain(0)
    with pytest.raises(PolicyError, match="page L0 E1 #0 is already in gpu"):
        bench.fetch(1, 1)
    bench.fetch(1)
    assert bench.held() == [1]
    bench.check()


def test_a_page_is_fetched_once_and_pages_are_placed_all_or_none() -> None:
    bench = Bench(slots=3, replacement="none")
    bench.fetch(0)
    told = r"page L0 E0 #0 is already in gpu .*: fetch it once, or evict it first"
    with pytest.raises(PolicyError, match=told):
        bench.fetch(1, 0)
    assert bench.held() == [0]
    bench.check()


def test_a_page_whose_transfer_was_cancelled_is_not_there() -> None:
    bench = Bench()
    bench.fetch_in_vain(0)
    with pytest.raises(NotResident, match="never came to gpu"):
        bench.read(0)
    bench.fetch(0)
    bench.read(0)
    assert bench.script.run()[-1] == "read (0,)"
    bench.check()


def test_a_page_whose_transfer_failed_is_that_failure() -> None:
    bench = Bench()
    bench.fetch(0)
    bench.script.fail("fetch (0,)")
    with pytest.raises(TaskFailed, match="fetch"):
        bench.read(0)
    bench.check()


def test_kept_pages_take_a_slot_of_their_own_size_and_need_no_edges() -> None:
    memory = Memory("gpu", 100)
    kept = FixedPages("kept", memory, PAGES[:2], [10, 20])
    kept.reserve()
    views: Views[tuple[int, ...]] = Views(memory, lambda key: tuple(PAGES[n] for n in key))
    view = views.show((0, 1), Script(gpu="ready_first").engine, 0)
    assert memory.used == 30
    assert view.slots == tuple(slots_of(kept))
    assert view.reads == ()
    assert ledger_problems(memory, [kept]) == []


# -- views -----------------------------------------------------------------------------------------


def test_a_kernel_that_reads_several_pages_waits_for_all_of_them() -> None:
    bench = Bench(slots=2)
    bench.fetch(0)
    bench.fetch(1)
    bench.read(0, 1)
    assert bench.script.run() == ["fetch (0,)", "fetch (1,)", "read (0, 1)"]


def test_a_page_that_is_not_there_is_named() -> None:
    bench = Bench(slots=2)
    bench.fetch(0)
    with pytest.raises(
        NotResident, match="page L0 E1 #0 is not in gpu: fetch it before the kernel that reads it"
    ):
        bench.read(0, 1)
    bench.check()


def test_replacing_one_page_of_a_view_waits_for_all_who_read_through_it() -> None:
    bench = Bench(slots=2)
    bench.fetch(0, 1)
    bench.read(0, 1, name="left", lane="gpu")
    bench.read(0, 1, name="right", lane="cpu")
    bench.fetch(2)
    bench.script.finish("fetch (0, 1)")
    bench.script.finish("left")
    assert bench.script.started() == ["fetch (0, 1)", "left", "right"]
    bench.script.finish("right")
    assert bench.script.started() == ["fetch (2,)"]


def test_many_kernels_that_read_many_pages_take_few_edges() -> None:
    bench = Bench(slots=6)
    bench.fetch(0)
    for number in range(1, 6):
        bench.fetch(number)
    tasks = [bench.read(0, 1, 2, 3, 4, 5, name=f"kernel {number}") for number in range(10)]
    assert [len(task.deps) for task in tasks] == [1] * 10


@pytest.mark.parametrize("pages", [(0,), (0, 1)], ids=["one page", "several"])
def test_readers_of_a_page_that_stays_are_dropped_two_steps_after_they_ran(pages: tuple[int, ...]) -> None:
    bench = Bench(slots=2)
    bench.fetch(*pages)
    readers = []
    for step in range(10):
        readers.append(bench.read(*pages, name=f"kernel {step}", step=step))
        bench.script.run()
    [view] = bench.views.open.values()
    assert [task for block in view.reads for task in block.readers] == readers[-2:]


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_a_transfer_names_the_readers_of_this_step_and_the_last_whenever_they_ran(late: bool) -> None:
    bench = Bench(slots=2)
    joins = bench.engine.joined = []
    earlier = [bench.fetch(0, 1)]
    for step in range(2):
        earlier.append(bench.read(0, 1, name=f"kernel {step}", step=step))
        if not late:
            bench.script.run()
    bench.evict(1)  # no kernel can read both pages any more, but page 0 stays
    earlier.append(bench.read(0, name="kernel 2", step=1))
    bench.evict(0)
    bench.fetch(2, step=1)
    over = bench.fetch(3, step=1)
    through = {join.id: join.deps for join in joins}
    named = {each for number in over.deps for each in through.get(number, [number])}
    assert named == {task.id for task in earlier}


def test_kernels_that_a_lost_page_cancelled_hold_nothing_up() -> None:
    bench = Bench(slots=2)
    bench.fetch(1)
    bench.fetch(0)
    bench.read(0, 1)
    bench.script.cancel("fetch (0,)")
    bench.evict(0)
    bench.fetch(2)
    assert bench.script.run() == ["fetch (1,)", "fetch (2,)"]
    assert bench.script.state("read (0, 1)") == "cancelled"
    bench.check()


# -- the checking mode -----------------------------------------------------------------------------


def test_the_checking_mode_notices_bytes_that_went_missing() -> None:
    bench = Bench()
    bench.memory._used += 10
    with pytest.raises(BrokenRule, match="gpu: 30 bytes used, 20 at the peak, of 100"):
        bench.engine.check_over()


def test_the_checking_mode_notices_a_slot_that_lost_its_page() -> None:
    bench = Bench()
    bench.fetch(0)
    bench.slot(0).page = None
    bench.script.finish("fetch (0,)")
    with pytest.raises(BrokenRule, match="page #0"):
        bench.engine.check_over()

"""Times of tasks become points of a cost table, and overlaps become rates beside other tasks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest

from moesched.calibration.contention import Observed, rates_beside
from moesched.calibration.extent import small_model
from moesched.calibration.task_times import RunKey, TaskTimes
from moesched.engine import Engine
from moesched.machines import CostPoint
from moesched.models.operations import Operations
from moesched.models.tensor_sizes import ResidentShare
from moesched.tasks import Kernel, Lane, PageTransfer, Task
from moesched.work import Work, WorkPart

MODEL = small_model("tiny", hidden=32, intermediate=48, heads=4, head_dim=8, vocabulary=64)
FEW = RunKey(MODEL, "bfloat16", 0)
OPERATIONS = Operations(MODEL, "bfloat16", ResidentShare(0.5, 0.5))
ACCELERATOR, HOST, DISK = Lane("accelerator"), Lane("host"), Lane("disk->host")
_numbers = count()


def task(
    verb: str,
    start: float,
    end: float,
    *,
    tokens: int = 4,
    lane: Lane = ACCELERATOR,
    layer: int = 0,
    step: int = 1,
    used: int = 3,
    operation: str = "",
) -> Task:
    """A task of the small model that took from `start` to `end` seconds; its tokens chose `used` experts.

    operation: the method of `Operations` that has its cost; by default the one called as the verb, or `expert`.
    """
    if verb == "fetch":
        kind: type[Task] = PageTransfer
        work = Work(lane.name, lane.name, nbytes=100, parts=(WorkPart(lane.name, 50, 2),))
    else:
        kind = Kernel
        amount = (
            OPERATIONS.attention([(1, 4)] * tokens)
            if verb in ("attention", "cpu_attention")
            else getattr(OPERATIONS, operation or ("expert" if verb == "run_expert" else verb))(tokens)
        )
        work = Work(verb, "cpu", amount.flops, amount.nbytes, tokens, amount.parts)
    made = kind(lane, work, verb, layer, 0, -1, None, step, generated=step)
    engine = Engine([lane])
    engine.submit(made)
    engine.finish(made, dict.fromkeys(range(used), 1))
    made.id, made.start, made.end = next(_numbers), round(start * 1e9), round(end * 1e9)
    return made


def costs(tasks: Sequence[Task]) -> dict[str, CostPoint]:
    times = TaskTimes()
    times.add_resident(FEW, tasks)
    return {point.operation: point for point in times.points()}


def rates(alone: list[Task], together: list[Task]) -> dict[tuple[str, str], float]:
    """Rates of tasks beside others, of which these were seen alone."""
    times = TaskTimes()
    times.add(FEW, alone)
    return times.rates(FEW, together)


# -- tasks to points


def test_a_task_on_weights_that_stay_is_told_from_one_on_weights_that_were_fetched_just_before() -> None:
    times = TaskTimes()
    times.add_resident(FEW, [task("route", 0, 0.5, layer=1)])
    times.add(FEW, [task("route", 0, 0.75, layer=0), task("route", 1, 1.75, layer=1)])
    times.add_fresh(FEW, [task("route", 2, 5, layer=0), task("route", 5, 6.25, layer=1)])
    found = {point.operation: point for point in times.points()}
    assert (found["resident route"].seconds, found["route"].seconds) == (0.5, 1.25)
    assert found["route"].rows == 4


def test_an_expert_that_was_fetched_for_an_earlier_task_is_told_from_one_that_was_fetched_just_before() -> (
    None
):
    times = TaskTimes()
    times.add(
        FEW,
        [task("run_expert", 0, 0.75, operation=each) for each in ("cached_expert", "fetched_expert")],
    )
    times.add_fresh(FEW, [task("run_expert", 0, 2, layer=1, operation="fetched_expert")])
    found = {point.operation: point.seconds for point in times.points()}
    assert found == {"cached expert": 0.75, "expert": 2.0}


def test_what_is_slowed_beside_others_is_held_against_weights_that_were_used_before() -> None:
    times = TaskTimes()
    times.add(FEW, [task("route", 0, 3, layer=1)])
    times.add_fresh(FEW, [task("route", 0, 4, layer=1)])
    together = [task("route", 0, 4, layer=1), task("fetch", 0, 4, lane=DISK)]
    assert times.rates(FEW, together)["few rows", "disk->host"] == pytest.approx(0.75)


def test_what_streams_is_held_against_weights_that_were_fetched_just_before() -> None:
    times = TaskTimes()
    times.add(FEW, [task("route", 0, 3, layer=1), task("route", 3, 4, layer=0)])
    times.add_fresh(FEW, [task("route", 0, 4, layer=1)])
    together = [task("route", 0, 5, layer=1), task("fetch", 0, 9, lane=DISK), task("route", 5, 9, layer=0)]
    assert times.rates(FEW, together, fresh=True) == {("few rows", "disk->host"): pytest.approx(0.8)}


def test_tasks_are_compared_within_their_own_batch() -> None:
    times = TaskTimes()
    times.add(FEW, [task("route", 0, 3)])
    times.add(FEW._replace(batch=1), [task("route", 0, 6)])
    together = [task("route", 0, 6), task("fetch", 0, 6, lane=DISK)]
    assert times.rates(FEW, together) == {("few rows", "disk->host"): pytest.approx(0.5)}
    assert times.rates(FEW._replace(batch=1), together) == {("few rows", "disk->host"): pytest.approx(1)}


def test_the_median_over_several_runs_counts_and_within_a_run_the_mean_of_all_but_the_first() -> None:
    times = TaskTimes()
    for ends in ((1.0, 2.0, 9.0), (0.5, 3.0, 4.0), (70.0, 8.0, 9.0)):
        times.add_resident(FEW, [task("route", 0, end) for end in ends])
    assert [point.seconds for point in times.points()] == [5.5]


@pytest.mark.parametrize("used", [3, 5])
def test_the_router_within_a_layers_second_half_is_a_product_and_experts_share_the_rest(used: int) -> None:
    tasks = [
        task("pre_attention", 0, 0.25),
        task("post_attention", 2, 3, used=used),
    ]
    found = costs([*tasks, task("route", 4, 4.9)])
    product, router = found["resident pre_attention"], found["resident route within post_attention"]
    assert router.seconds / router.size == pytest.approx(product.seconds / product.size, rel=1e-3)
    experts = found["resident experts"]
    assert experts.seconds == pytest.approx((1 - router.seconds) / used, rel=1e-3)
    assert experts.rows == pytest.approx(8 / used, rel=1e-3)


def test_an_await_takes_the_time_from_routing_to_the_first_expert_but_not_that_of_its_dispatch() -> None:
    times = TaskTimes()
    times.add_gaps([task("pre_attention", 0, 1), task("attention", 1.25, 2)])
    times.add_resident(FEW, [task("route", 2, 3), task("run_expert", 4, 5), task("run_expert", 5, 6)])
    found = {point.operation: point.seconds for point in times.points()}
    assert (found["dispatch"], found["await"]) == (0.25, 0.75)


def test_an_await_is_timed_by_the_tasks_that_are_submitted_until_the_next_await() -> None:
    times = TaskTimes()
    for step in (1, 2):
        few = [task("route", 0, 1, step=step), task("run_expert", 2, 3, step=step)]
        many = [task("route", 3, 4, step=step), *(task("run_expert", 6, 7, step=step) for _ in range(4))]
        times.add_resident(FEW, [*few, *many])
    awaits = {point.rows: point.seconds for point in times.points() if point.operation == "await"}
    assert awaits == {2: 1, 4: 2}


def test_attention_is_split_into_sequences_calls_and_what_all_have_in_common() -> None:
    times = TaskTimes()
    tasks = []
    for micro_batch, (lengths, seconds) in enumerate([([4], 7.0), ([4, 4, 4], 13.0), ([4, 5, 6], 17.0)]):
        tasks.append(task("attention", 0, seconds))
        tasks[-1].micro_batch = micro_batch
        flops, nbytes, parts, _ = OPERATIONS.attention_step(lengths)
        tasks[-1].work = Work("attention", "cpu", flops, nbytes, len(lengths), parts)
    times.add_resident(FEW, tasks)
    found = {point.operation: point.seconds for point in times.points()}
    assert found == {"attention": 2.0, "attention call": 2.0, "step attention": 3.0}


def test_pages_take_as_much_longer_than_reads_as_they_were_seen_to() -> None:
    times = TaskTimes()
    fetch = task("fetch", 0, 3, lane=DISK)
    assert times.longer_than("disk->host", lambda size, rows: 0.5)(50) == 1.0
    times.add(FEW._replace(dtype="float32"), [fetch])
    assert times.longer_than("disk->host", lambda size, rows: 0.5)(50) == 1.0
    times.add(FEW, [fetch])
    assert times.longer_than("disk->host", lambda size, rows: size * rows / 50)(50) == 1.5  # 3 s, not 2


def test_how_much_longer_follows_the_size_of_the_pages_between_those_that_were_moved() -> None:
    times = TaskTimes()
    for size, seconds in ((100, 2), (300, 3)):
        fetch = task("fetch", 0, seconds, lane=DISK)
        fetch.work = Work(DISK.name, DISK.name, parts=(WorkPart(DISK.name, size, 2),))
        times.add(FEW, [fetch])
    longer = times.longer_than("disk->host", lambda size, rows: 1.0)
    assert [longer(size) for size in (50, 100, 200, 300, 900)] == [2, 2, 2.5, 3, 3]


# -- what runs at once


def test_how_fast_a_task_goes_on_beside_another_follows_from_how_long_they_overlapped() -> None:
    alone = [task("route", 0, 4), task("fetch", 0, 3, lane=DISK)]
    together = [task("route", 0, 6), task("fetch", 0, 4, lane=DISK)]
    # Of the route's 6 seconds 4 were shared; the other 2 did 2 seconds' work, so the 4 did the other 2.
    expected = {("few rows", "disk->host"): 0.5, ("disk->host", "few rows"): 0.75}
    assert rates(alone, together) == pytest.approx(expected)


def test_products_of_few_rows_and_of_many_are_of_different_sorts() -> None:
    alone = [task("attention", 0, 1), task("attention", 1, 2, step=2)]
    few = [task("cpu_attention", 0, 2, lane=HOST), task("post_attention", 0, 2, tokens=8)]
    many = [
        task("cpu_attention", 0, 1.25, lane=HOST, step=2),
        task("post_attention", 0, 2, tokens=256, step=2),
    ]
    assert rates(alone, few) == {("attention", "few rows"): pytest.approx(0.5)}
    assert rates(alone, many) == {("attention", "many rows"): pytest.approx(0.8)}


def test_attention_over_sequences_of_several_lengths_is_a_class_of_work_of_its_own() -> None:
    one, several = task("attention", 0, 1), task("attention", 1, 2, step=2)
    work = OPERATIONS.attention_step([4, 5, 6])
    several.work = Work("attention", "cpu", work.flops, work.nbytes, 3, work.parts)
    slowed = [
        task("attention", 0, 2),
        task("attention", 2, 6, step=2),
        task("fetch", 0, 9, lane=DISK),
    ]
    slowed[1].work = several.work
    assert rates([one, several], slowed) == {
        ("attention", "disk->host"): pytest.approx(0.5),
        ("attention calls", "disk->host"): pytest.approx(0.25),
    }


def test_of_a_task_beside_one_sort_after_another_each_has_its_rate() -> None:
    alone = [task("route", 0, 4), task("combine", 4, 10), task("fetch", 0, 4, lane=DISK)]
    beside_the_fetch = [task("route", 0, 5), task("fetch", 0, 5, lane=DISK)]
    beside_one_after_the_other = [
        task("combine", 10, 20),
        task("fetch", 10, 15, lane=DISK),
        task("cpu_attention", 15, 20, lane=HOST),
    ]
    found = rates(alone, beside_the_fetch + beside_one_after_the_other)
    assert found["few rows", "disk->host"] == pytest.approx(0.8, rel=0.01)
    assert found["few rows", "attention"] == pytest.approx(0.4, rel=0.01)


def test_what_runs_beside_at_once_has_a_rate_of_its_own() -> None:
    together = [
        task("route", 0, 10),
        task("fetch", 0, 10, lane=DISK),
        task("cpu_attention", 0, 10, lane=HOST),
    ]
    assert rates([task("route", 0, 4)], together) == {
        ("few rows", "attention + disk->host"): pytest.approx(0.4)
    }


def test_rates_bring_the_tasks_to_the_right_sum() -> None:
    """Of tasks that a slow one is among, the mean counts, as the time of their lane is a sum."""
    others = [Observed(1.0, took, {"few rows": took}) for took in (1.0, 1.0, 2.5)]
    assert rates_beside(others) == {"few rows": pytest.approx(3 / 4.5)}


def test_tasks_that_lost_their_core_do_not_count() -> None:
    others = [Observed(1e-4, took, {"few rows": took}) for took in (2e-4, 2e-4, 2e-4, 4e-3)]
    assert rates_beside(others) == {"few rows": pytest.approx(0.5)}


def test_mixes_that_cannot_be_told_apart_have_one_rate() -> None:
    always_alike = [Observed(1.0, 2.0, {"few rows": 1.9, "attention + few rows": 0.1})] * 5
    assert rates_beside(always_alike) == pytest.approx({"few rows": 0.5, "attention + few rows": 0.5})


def test_a_mix_that_was_hardly_seen_has_the_rate_of_all() -> None:
    tasks = [Observed(1.0, 2.0, {"few rows": 2.0})] * 9 + [Observed(1e-5, 1e-4, {"attention": 1e-4})]
    assert rates_beside(tasks)["attention"] == pytest.approx(0.5, rel=0.02)


def test_tasks_that_hardly_overlap_say_nothing() -> None:
    assert rates([task("route", 0, 4)], [task("route", 0, 4), task("fetch", 3.5, 9, lane=DISK)]) == {}

"""Savings of a larger pool: its rule played again from the accesses in a trace, against a run with more room."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesched.analysis.larger_pools import with_larger_pool
from moesched.analysis.pool_replay import RULES, outcomes_with_more_room, ring_outcomes
from moesched.analysis.replayed_run import replay_recording, without_loading
from moesched.analysis.what_if import Change, changed_works, what_if
from moesched.dispatch import LowestScore
from moesched.engine import Engine
from moesched.errors import BadInput
from moesched.plugins import make_policy
from moesched.runs.simulation import simulate
from moesched.seams import Eviction
from moesched.steps.memory import Memory, Pool
from moesched.steps.pool_counts import FETCHED
from moesched.tasks import PageTransfer
from moesched.trace import About, Recorder, Recording, read_trace, write_trace
from moesched.trace.access_records import accesses_of, log_accesses
from moesched.trace.recording import LEFT, USED, CachedPage, CacheRule, PoolAccesses
from page_bench import PAGES, Bench
from runs import make_plan
from traces import run_graph, task, timetable

SMALL: dict[str, dict[str, int]] = {
    "lru_offload": {"offload_per_layer": 6},
    "prefetch_gate": {"offload_per_layer": 6},
    "fate": {"offload_per_layer": 6},
    "least_stale": {"experts": 24},
}
"""Policies whose experts all run on the accelerator, with room for a quarter of them."""

LARGE: dict[str, dict[str, int]] = {
    "lru_offload": {"offload_per_layer": 4},
    "prefetch_gate": {"offload_per_layer": 4},
    "least_stale": {"experts": 48},
}


def simulated(policy: str, sizes: dict[str, int]) -> Recording:
    """A run on a T4 of one request."""
    chosen, recorder = make_policy(policy, sizes), Recorder()
    plan = make_plan(chosen, requests=1, new_tokens=24, micro_batch_size=1)
    simulate(plan, chosen, recorder=recorder)
    return recorder.recording()


def seconds(recording: Recording) -> float:
    """The duration of a run without loading."""
    run = without_loading(recording)
    return (run.end - run.start) / 1e9


def of_a_bench(slots: int, replacement: Literal["lru"] | Eviction, reads: list[int]) -> PoolAccesses:
    """The accesses of a pool whose pages are fetched whenever they are read and not there."""
    bench = Bench(slots, replacement)
    log_accesses(bench.pool)
    for step, number in enumerate(reads):
        if PAGES[number] not in bench.pool:
            bench.fetch(number, step=step)
        bench.read(number, name=f"read {step}", step=step)
    accesses = accesses_of(0, bench.pool)
    assert accesses is not None
    return accesses


def fetches(accesses: PoolAccesses) -> int:
    return sum(access[0] >= 0 for access in accesses.accesses)


@pytest.mark.parametrize("rule", ["lru", *RULES])
@given(reads=st.lists(st.integers(0, 5), max_size=40), slots=st.integers(1, 3))
@settings(max_examples=40)
def test_a_rule_played_with_more_room_spares_what_a_larger_pool_does_not_fetch(
    rule: Literal["lru"] | Callable[[], Eviction], reads: list[int], slots: int
) -> None:
    small, large = (of_a_bench(room, rule if rule == "lru" else rule(), reads) for room in (slots, 2 * slots))
    assert not any(outcome.spared for outcome in outcomes_with_more_room(small, 1.0).values())
    spared = sum(outcome.spared for outcome in outcomes_with_more_room(small, 2.0).values())
    assert fetches(small) - spared == fetches(large)


@pytest.mark.parametrize("policy", SMALL)
def test_with_the_same_room_the_run_is_the_same_to_the_nanosecond(policy: str) -> None:
    recording = simulated(policy, SMALL[policy])
    [accesses] = recording.accesses
    same = with_larger_pool(recording, accesses, 1.0)
    replayed = replay_recording(same, works=changed_works(same, Change()))
    assert timetable(replayed) == timetable(recording)


@pytest.mark.parametrize("policy", LARGE)
def test_twice_the_room_takes_the_time_of_the_policy_with_twice_the_room(policy: str) -> None:
    small, large = (simulated(policy, sizes[policy]) for sizes in (SMALL, LARGE))
    [answer] = what_if(small, ["pool experts x2"])
    assert answer.decisions_unchanged
    assert answer.speedup > 1.05
    assert answer.seconds == pytest.approx(seconds(large), rel=0.1)


def test_in_a_larger_ring_transfers_wait_for_older_pages() -> None:
    pool = Pool("ring", Memory("gpu", 100), 1, 10)

    def graph(engine: Engine) -> None:
        link, gpu = engine.lanes
        for layer in range(4):
            slots = pool.assign_all([PAGES[layer]], engine, FETCHED, 0)
            moved = PageTransfer(
                link, task(link, "fetch", 100).work, "fetch", layer, pages=(PAGES[layer],), slots=slots
            )
            engine.submit(moved, (), slots)
            engine.submit(task(gpu, "kernel", 80), slots)

    recording = run_graph(graph, ["link", "gpu"])
    recording.accesses = [PoolAccesses(rank=0, pool="ring in gpu", slots=1, replacement="ring")]
    assert recording.end == 4 * 180
    [answer] = what_if(recording, ["pool ring x2"])
    assert answer.seconds == pytest.approx((4 * 100 + 80) * 1e-9)


def test_a_ring_overwrites_its_oldest_pages() -> None:
    outcomes = ring_outcomes(3, {7: 2, 8: 1, 9: 2})
    assert [outcomes[each].transfers for each in (7, 8, 9)] == [[], [], [7]]
    assert not any(outcome.spared for outcome in outcomes.values())


def test_a_trace_carries_accesses_and_rules(tmp_path: Path) -> None:
    recording = simulated("lru_offload", SMALL["lru_offload"])
    write_trace(tmp_path / "trace.json", recording, About(driver="virtual"))
    read = read_trace(tmp_path / "trace.json").recording
    assert read.accesses == recording.accesses
    assert what_if(read, ["pool experts x2"]) == what_if(recording, ["pool experts x2"])


def test_a_rule_that_needs_more_than_accesses_is_refused_by_name() -> None:
    accesses = of_a_bench(2, LowestScore(), [0, 1, 2])
    with pytest.raises(
        BadInput, match=r"pool weights in gpu: its eviction rule LowestScore cannot be played again"
    ):
        outcomes_with_more_room(accesses, 2.0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("pool weights x2", r"the run has no pool 'weights', only experts, experts in gpu"),
        ("pool experts x0.5", "traces do not tell what a smaller pool would fetch: give a factor from 1 on"),
    ],
)
def test_a_pool_that_is_not_there_or_shrinks_is_refused(change: str, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        what_if(simulated("lru_offload", SMALL["lru_offload"]), [change])


@pytest.mark.parametrize(
    "damage",
    [
        {"slots": -1},
        {"caches": [CacheRule("LeastRecentlyUsed", -5)]},
        {"accesses": [()]},
        {"accesses": [(USED, 0, 99, 0, 1)]},
        {"accesses": [(USED, 1, 0, 0, 1)]},
        {"accesses": [(USED, 0)]},
        {"accesses": [(LEFT, -2, 0)]},
        {"accesses": [(7, 99)]},
    ],
    ids=str,
)
def test_accesses_that_name_what_is_not_there_are_damage(damage: dict[str, Any], tmp_path: Path) -> None:
    recording = run_graph(lambda engine: engine.submit(task(engine.lanes[0], "kernel")), ["gpu"])
    right = PoolAccesses(
        rank=0, pool="experts in gpu", slots=2, replacement="lru", pages=[CachedPage(0, 0, 0)]
    )
    recording.accesses = [msgspec.structs.replace(right, **damage)]
    write_trace(tmp_path / "trace.json", recording, About(driver="virtual"))
    with pytest.raises(BadInput, match="the trace is damaged: "):
        read_trace(tmp_path / "trace.json")

"""Policies that keep experts in a cache: which ones are fetched for a given routing, and which one goes for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from random import Random
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from moesched.dispatch import CachedExperts, LeastRecentStep
from moesched.machines import Machine
from moesched.planner.traits import resident_bytes
from moesched.plugins import make_policy
from moesched.routing.profile import RoutingProfile, write_profile
from moesched.tasks import CANCELLED, DEMAND, IDLE, HostKernel, Kernel, class_of
from moesched.testing import Case
from scripted_routing import BALANCED, FAST_CPU, LAYOUT, SLOW_CPU, T4, Choices, simulated, with_rates

# -- Mixtral-Offloading --------------------------------------------------------------------------------------------

ONE_LAYER = {"offload_per_layer": 4}
"""Of 6 experts, 4 and 5 are in the cache at first."""


def test_at_first_the_last_experts_of_each_layer_are_in_its_cache() -> None:
    watch = simulated("lru_offload", [[[4, 5], [4, 5]]], ONE_LAYER)
    assert [(task.layer, task.expert) for task in watch.tasks("fetch")] == [(0, 4), (0, 5), (1, 4), (1, 5)]
    assert watch.experts("fetch") == []


FETCHED: dict[str, tuple[str, Choices, dict[str, int], dict[str, Any], list[tuple[int, int, int]]]] = {
    "a missing expert takes the place of that used longest ago": (
        # 0 for 5; 1 for 0, since 4 was used since; 0 for 4; 5 for 1
        "lru_offload", [[[4]], [[0]], [[4]], [[1]], [[0]], [[5]]], ONE_LAYER, {},
        [(1, 0, 0), (3, 0, 1), (4, 0, 0), (5, 0, 5)],
    ),
    "layers have caches of their own": (
        "lru_offload", [[[0, 1], [4, 5]], [[0, 1], [4, 5]]], ONE_LAYER, {}, [(0, 0, 0), (0, 0, 1)],
    ),
    "where all experts fit none is ever fetched": ("lru_offload", [[[0, 1, 2, 3, 4, 5]]] * 2, {}, {}, []),
    "without a cache every expert is fetched through the buffers": (
        "lru_offload", [[[1, 2]]] * 3, {"offload_per_layer": 6, "buffers": 1}, {"weights": 0.5},
        [(step, 0, expert) for step in range(3) for expert in (1, 2)],
    ),
    "what was last used in the earliest step goes whatever its layer": (
        # At first 0 of both layers is there; in step 1 that of layer 1 goes, in step 2 expert 1.
        "expert_cache", [[[0], [0]], [[0], [1]], [[0], [0]]], {"experts": 2}, {"machine": SLOW_CPU},
        [(1, 1, 1), (2, 1, 0)],
    ),
    "an expert that is given up is the one that is fetched when it is needed again": (
        # Expert 1 of layer 0 is there at first. Step 1 gives up 0 of layer 1, which one token had chosen, for its 1.
        "expert_cache", [[{0: 3}, {0: 1}], [[1], [1]], [[0], [1]], [[0], [0]]], {"experts": 3},
        {"machine": SLOW_CPU}, [(1, 1, 1), (3, 1, 0)],
    ),
    "what missed the cache and was fetched is there the next time": (
        "expert_cache", [[[5]]] * 4, {"experts": 2}, {"machine": SLOW_CPU}, [(0, 0, 5)],
    ),
    "what was foretold enters the cache when it is used": (
        "prefetch_gate", [[[4, 5], [0, 1]]] * 3, ONE_LAYER, {}, [(0, 1, 0), (0, 1, 1)],
    ),
}  # fmt: skip
"""A policy, the experts of each layer of each step, settings, the machine, and step, layer and expert of each fetch."""


@pytest.mark.parametrize("what", FETCHED)
def test_of_what_is_fetched(what: str) -> None:
    policy, steps, settings, more, fetches = FETCHED[what]
    assert simulated(policy, steps, settings, **more).experts("fetch") == fetches


def test_experts_of_the_cache_run_first_while_the_others_come() -> None:
    watch = simulated("lru_offload", [[[0, 1, 4, 5]]], ONE_LAYER)
    assert [expert for _, _, expert in watch.experts("run_expert")] == [4, 5, 0, 1]
    fetches = [task for task in watch.tasks("fetch") if task.step >= 0]
    cached = watch.tasks("run_expert")[:2]
    assert fetches[0].start <= cached[0].start
    assert fetches[1].start == fetches[0].end, "the link has no pause"
    assert all(isinstance(task, Kernel) for task in watch.tasks("run_expert"))


def test_an_expert_is_fetched_once_for_all_micro_batches_of_a_step() -> None:
    watch = simulated(
        "lru_offload", [[[0, 1, 2, 3, 4, 5]]] * 2, ONE_LAYER, prompts=(2, 3, 1), micro_batch_size=1
    )
    # After the first step 2 and 3 are there.
    assert watch.experts("fetch") == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3)] + [
        (1, 0, 0),
        (1, 0, 1),
        (1, 0, 4),
        (1, 0, 5),
    ]
    assert len(watch.experts("run_expert")) == 2 * 3 * 6


def test_by_default_as_many_experts_of_each_layer_are_cached_as_fit() -> None:
    policy: Any = make_policy("lru_offload")
    plan = Case(name="tight", machine=T4, weights=0.7).plan(policy)
    one_more_of_each_layer = len(plan.layers) * sum(page.nbytes for page in plan.layout.expert(0, 0))
    assert 0 < len(policy.cached[0]) < 4
    assert plan.free("accelerator") < one_more_of_each_layer


def test_what_is_in_a_cache_counts_as_weights_on_the_gpu() -> None:
    policy = make_policy("lru_offload", {"offload_per_layer": 1})
    plan = Case(name="kept", machine=T4, weights=1.5).plan(policy)
    dense = sum(page.nbytes for page in plan.layout.pages if page.expert < 0)
    experts = sum(page.nbytes for page in plan.layout.pages if page.expert >= 0)
    assert resident_bytes(plan) == dense + experts * 3 // 4


# -- one cache over all layers -------------------------------------------------------------------------------------


def test_the_cache_begins_with_as_many_of_every_layer_or_with_the_most_popular(tmp_path: Path) -> None:
    watch = simulated("expert_cache", [[[0], [0]]], {"experts": 4})
    assert [(task.layer, task.expert) for task in watch.tasks("fetch")] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    counts = ((0, 0, 0, 0, 0, 9), (8, 0, 0, 7, 6, 0))
    profile = RoutingProfile(model="cache", layers=2, experts=6, top_k=2, tokens=15, counts=counts)
    write_profile(profile, tmp_path / "popularity.csv")
    popularity = str(tmp_path / "popularity.csv")
    watch = simulated("expert_cache", [[[5], [0]]], {"experts": 3, "popularity": popularity})
    assert [(task.layer, task.expert) for task in watch.tasks("fetch")] == [(0, 5), (1, 0), (1, 3)]


def test_of_experts_last_used_in_the_same_step_the_one_that_fewest_tokens_chose_goes() -> None:
    cache = CachedExperts(LAYOUT, LeastRecentStep(), room=4)
    for step, layer, tokens in ((0, 0, 3), (0, 1, 1), (0, 2, 2), (1, 3, 1)):
        assert cache.hits(layer, {0: tokens}, step) == []
        assert cache.enter((layer, 0), step) is None
    assert [cache.enter((layer, 1), 2) for layer in range(4)] == [(1, 0), (2, 0), (0, 0), (3, 0)]
    cache = CachedExperts(LAYOUT, LeastRecentStep(), 4, [(0, expert) for expert in range(4)])
    for step in range(998):
        assert cache.hits(0, {step % 4: 1}, step) == [step % 4]
    last_use = [cache.enter((1, expert), 998) for expert in range(4)]
    assert last_use == [(0, 2), (0, 3), (0, 0), (0, 1)], "however often one was used before"


def test_fewest_fetches_each_missing_expert_comes_once_for_all_micro_batches() -> None:
    watch = simulated(
        "expert_cache",
        [[[2, 3]]] * 2,
        {"experts": 2},
        machine=SLOW_CPU,
        prompts=(1, 1, 1),
        micro_batch_size=1,
    )
    assert watch.experts("fetch") == [(0, 0, 2), (0, 0, 3)]
    assert len(watch.experts("run_expert")) == 2 * 3 * 2


@pytest.mark.parametrize(("machine", "on_host"), [(FAST_CPU, {0, 1}), (SLOW_CPU, set())])
def test_misses_run_where_the_layer_ends_first(machine: Machine, on_host: set[int]) -> None:
    watch = simulated("expert_cache", [[[0, 1]]], {"experts": 0}, machine=machine)
    there = {task.expert for task in watch.tasks("run_expert") if isinstance(task, HostKernel)}
    assert there == on_host
    assert {expert for _, _, expert in watch.experts("fetch")} == {0, 1} - on_host


def test_those_with_the_most_tokens_are_fetched_while_the_host_runs_the_others() -> None:
    watch = simulated(
        "expert_cache", [[{0: 1, 1: 9, 2: 1, 3: 8}]], {"experts": 0}, machine=BALANCED, prompts=(19,)
    )
    assert [expert for _, _, expert in watch.experts("fetch")] == [1, 3]
    there = [task for task in watch.tasks("run_expert") if isinstance(task, HostKernel)]
    assert [task.expert for task in there] == [0, 2]
    link = watch.tasks("fetch")[0]
    assert there[0].start < link.end, "the host begins at once"


def test_the_split_of_misses_is_hardly_worse_than_the_best_that_there_is() -> None:
    """Against all subsets in all orders: it is the best one that fetches those with the most tokens."""
    choose = Random(1)
    policy: Any = make_policy("expert_cache")
    policy.cache = SimpleNamespace(on_host=True)
    ratios = []
    for _ in range(200):
        rates = choose.uniform(0.1, 3), choose.uniform(0.01, 0.5)
        policy.latencies = Rates(choose.uniform(0.5, 2), *rates)
        tokens = {expert: choose.randint(1, 9) for expert in range(7)}
        misses = sorted(range(2, 7), key=lambda expert: -tokens[expert])
        count = policy._fetches([0, 1], misses, {0: tokens})
        ends = [
            end_of(policy.latencies, tokens, chosen, set(misses) - {*chosen})
            for count in range(6)
            for chosen in permutations(misses, count)
        ]
        ratios.append(end_of(policy.latencies, tokens, misses[:count], misses[count:]) / min(ends))
    assert fmean(ratios) < 1.05
    assert max(ratios) < 1.25


class Rates(NamedTuple):
    """Latencies that grow with the tokens."""

    transfer: float
    host: float
    accelerator: float

    def at_host(self, tokens: int) -> float:
        return self.host * tokens

    def at_accelerator(self, tokens: int) -> float:
        return self.accelerator * tokens


def end_of(
    latencies: Rates, tokens: Mapping[int, int], fetched: Sequence[int], on_host: Iterable[int]
) -> float:
    """The ends of a layer's experts 0 and 1, which are there, of the fetched ones and of those on the host."""
    here = sum(latencies.at_accelerator(tokens[expert]) for expert in (0, 1))
    for number, expert in enumerate(fetched, 1):
        here = max(here, number * latencies.transfer) + latencies.at_accelerator(tokens[expert])
    return max(here, sum(latencies.at_host(tokens[expert]) for expert in on_host))


# -- prefetches by the next layer's router -------------------------------------------------------------------------

TWO_LAYERS = [[[4, 5], [0, 1]], [[4, 5], [2, 3]]]


def test_what_the_next_layers_router_foretells_comes_while_this_layers_experts_are_still_to_run() -> None:
    watch = simulated("prefetch_gate", TWO_LAYERS, ONE_LAYER, machine=SLOW_CPU)
    assert watch.experts("fetch") == [(0, 1, 0), (0, 1, 1), (1, 1, 2), (1, 1, 3)]
    first = next(task for task in watch.tasks("fetch") if task.step == 0)
    attention = next(task for task in watch.tasks("attention") if task.layer == 1)
    assert first.start < attention.start
    assert class_of(first) == IDLE
    previews = [(task.step, task.layer) for task in watch.tasks("preview_route")]
    assert previews == [(0, 1), (1, 1)], "the layers of a step but the first are foretold"
    assert simulated("prefetch_gate", TWO_LAYERS, {}).tasks("preview_route", "fetch") == [], (
        "with room for all"
    )


def test_what_was_foretold_and_is_needed_now_is_as_urgent_as_any_other_fetch() -> None:
    slow_link = with_rates(link=1e5, cpu=1e9)
    watch = simulated("prefetch_gate", [[[4, 5], [0, 1]]], ONE_LAYER, machine=slow_link)
    under_way, waiting = (task for task in watch.tasks("fetch") if task.step >= 0)
    assert (class_of(under_way), class_of(waiting)) == (IDLE, DEMAND)


def test_no_more_is_foretold_at_a_time_than_there_are_buffers_but_one() -> None:
    steps: Choices = [[[4], {0: 1, 1: 7, 2: 8, 3: 1}]]
    watch = simulated("prefetch_gate", steps, {**ONE_LAYER, "buffers": 3}, prompts=(17,))
    classes = [(task.expert, class_of(task)) for task in watch.tasks("fetch") if task.step >= 0]
    assert classes[:2] == [(2, IDLE), (1, IDLE)], "those with the most tokens"
    assert classes[2:] == [(0, DEMAND), (3, DEMAND)]


def test_a_fetch_that_is_needed_now_overtakes_what_was_foretold() -> None:
    slow_link = with_rates(link=1e5, cpu=1e9)
    watch = simulated("prefetch_gate", [[[0, 1], [2, 3]]], ONE_LAYER, machine=slow_link)
    by_start = sorted((task for task in watch.tasks("fetch") if task.step >= 0), key=lambda task: task.start)
    assert [(task.layer, task.expert) for task in by_start] == [(0, 0), (0, 1), (1, 2), (1, 3)]


def test_a_prefetch_that_was_wrong_and_has_not_started_is_cancelled_and_moves_no_bytes() -> None:
    # Two experts of layer 1 are foretold wrongly in both steps, and the link is slow.
    slow_link = with_rates(link=1e5, cpu=1e9)
    watch = simulated("prefetch_gate", [[[4, 5], [4, 5]]] * 2, ONE_LAYER, accuracy=0.0, machine=slow_link)
    came = [task for task in watch.tasks("fetch") if task.step >= 0]
    never_came = watch.tasks("fetch", state=CANCELLED)
    assert (len(came), len(never_came)) == (1, 3), (
        "the first one is under way; the link is busy when others are cancelled"
    )
    assert all(task.start == task.end == -1 for task in never_came)
    link = never_came[0].lane
    assert link.busy == sum(
        task.end - task.start for task in watch.tasks("fetch", "load") if task.lane is link
    )
    assert len(watch.experts("run_expert")) == 8

"""Policies that keep experts in a cache: which ones are fetched for a given routing, and which one goes for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from moesched.errors import BadInput
from moesched.machines import load_machine
from moesched.planner.traits import kept_bytes
from moesched.plugins import make_policy
from moesched.runs import simulate
from moesched.tasks import Kernel, Task
from moesched.testing import Case, policy_cases

T4 = load_machine("t4")
Choices = Sequence[Sequence[Sequence[int]]]
"""Expert ids by step and layer."""


class Scripted:
    """A routing that says which experts a step's tokens take in each layer, whatever the micro-batch."""

    def __init__(self, choices: Choices) -> None:
        self._choices = choices

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> Mapping[int, int]:
        return dict.fromkeys(self._choices[step][layer], 1)


class Watch:
    """Remembers tasks in their order of submission."""

    def __init__(self) -> None:
        self._tasks: list[Task] = []

    def ended(self, task: Task) -> None:
        self._tasks.append(task)

    def tasks(self, *verbs: str) -> list[Task]:
        return sorted((task for task in self._tasks if task.verb in verbs), key=lambda task: task.id)

    def experts(self, *verbs: str) -> list[tuple[int, int, int]]:
        """Step, layer and expert of the steps' tasks."""
        return [(task.step, task.layer, task.expert) for task in self.tasks(*verbs) if task.step >= 0]


def simulated(policy: str, choices: Choices, settings: Mapping[str, Any], **case: Any) -> Watch:
    """A policy's run on the T4's virtual clock, for one request by default."""
    case = {"prompts": (1,), "experts": 6, "layers": len(choices[0]), "weights": 1.5, **case}
    made, watch = make_policy(policy, dict(settings)), Watch()
    plan = Case(name="cache", machine=T4, new_tokens=len(choices), **case).plan(made)
    simulate(plan, made, routing=Scripted(choices), observers=[watch])  # type: ignore[arg-type]
    return watch


# -- Mixtral-Offloading --------------------------------------------------------------------------------------------

ONE_LAYER = {"offload_per_layer": 4}
"""Of 6 experts, 4 and 5 are in the cache at first."""


def test_at_first_the_last_experts_of_each_layer_are_in_its_cache() -> None:
    watch = simulated("lru_offload", [[[4, 5], [4, 5]]], ONE_LAYER)
    assert [(task.layer, task.expert) for task in watch.tasks("fetch")] == [(0, 4), (0, 5), (1, 4), (1, 5)]
    assert watch.experts("fetch") == []


def test_a_missing_expert_takes_the_place_of_that_used_longest_ago() -> None:
    used = [[4], [0], [4], [1], [0], [5]]
    watch = simulated("lru_offload", [[step] for step in used], ONE_LAYER)
    # 0 for 5; 1 for 0, since 4 was used since; 0 for 4; 5 for 1
    assert watch.experts("fetch") == [(1, 0, 0), (3, 0, 1), (4, 0, 0), (5, 0, 5)]


def test_layers_have_caches_of_their_own() -> None:
    watch = simulated("lru_offload", [[[0, 1], [4, 5]], [[0, 1], [4, 5]]], ONE_LAYER)
    assert watch.experts("fetch") == [(0, 0, 0), (0, 0, 1)]


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
    policy = make_policy("lru_offload")
    plan = Case(name="tight", machine=T4, weights=0.7).plan(policy)
    one_more_of_each_layer = len(plan.layers) * sum(page.nbytes for page in plan.layout.expert(0, 0))
    assert 0 < policy.room < 4
    assert plan.free("accelerator") < one_more_of_each_layer


def test_where_all_experts_fit_none_is_ever_fetched() -> None:
    assert simulated("lru_offload", [[[0, 1, 2, 3, 4, 5]]] * 2, {}).tasks("fetch") == []


def test_without_a_cache_every_expert_is_fetched_through_the_buffers() -> None:
    watch = simulated("lru_offload", [[[1, 2]]] * 3, {"offload_per_layer": 6, "buffers": 1}, weights=0.5)
    assert watch.experts("fetch") == [(step, 0, expert) for step in range(3) for expert in (1, 2)]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"offload_per_layer": 7}, "offload_per_layer is 7, but a layer of cache has 6 experts: give 0 to 6"),
        ({"buffers": 0}, "buffers is 0: give 1 or more"),
        ({"offload_per_layer": 0}, "LruOffload does not fit: .* bytes too few"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, int], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        simulated("lru_offload", [[[0]]], settings, weights=0.8)


def test_what_is_in_a_cache_counts_as_weights_on_the_gpu() -> None:
    policy = make_policy("lru_offload", {"offload_per_layer": 1})
    plan = Case(name="kept", machine=T4, weights=1.5).plan(policy)
    dense = sum(page.nbytes for page in plan.layout.pages if page.expert < 0)
    experts = sum(page.nbytes for page in plan.layout.pages if page.expert >= 0)
    assert kept_bytes(plan) == dense + experts * 3 // 4


@pytest.mark.parametrize("case", policy_cases(), ids=lambda case: case.name)
def test_simulated_runs_come_to_their_end_on_every_machine(case: Case) -> None:
    policy = make_policy("lru_offload")
    plan = case.plan(policy)
    assert simulate(plan, policy).simulated_seconds > 0

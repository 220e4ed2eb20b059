"""Policies cannot change the plan, the steps, the pools and the values that they see."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.robustness._meddling import attributes, reachable
from meddling import CASE, CLOCKS, Everything, Meddling, Mistake, refused
from moesched.errors import PolicyError
from moesched.runs.policy_errors import policy_line
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.testing import run_on_symbols
from moesched.testing.policy_checks import Clock


def set_layers(step: Step, plan: Plan) -> None:
    step.layers = step.layers[:2]


def set_micro_batches(step: Step, plan: Plan) -> None:
    step.micro_batches = step.micro_batches[:1]


def say_it_is_the_last(step: Step, plan: Plan) -> None:
    step.last = True


def forget_the_layers(step: Step, plan: Plan) -> None:
    del step.layers


def replace_a_verb(step: Step, plan: Plan) -> None:
    step.attention = step.cpu_attention  # type: ignore[method-assign]  # as a policy without types would


def set_layers_of_the_plan(step: Step, plan: Plan) -> None:
    plan.layers = plan.layers[:2]


def raise_a_budget(step: Step, plan: Plan) -> None:
    plan.memory("accelerator").capacity *= 2


def forget_a_memory(step: Step, plan: Plan) -> None:
    plan.memories.clear()  # type: ignore[attr-defined]


def make_a_kernel_free(step: Step, plan: Plan) -> None:
    plan.machine.processors["gpu"].flops["bfloat16"] = 1e30


def change_the_order_of_lanes(step: Step, plan: Plan) -> None:
    plan.discipline = "in_order"


def keep_more(step: Step, plan: Plan) -> None:
    plan.keep(plan.layout.pages[:1])


def close_the_step(step: Step, plan: Plan) -> None:
    step.close()


MISTAKES: list[tuple[Mistake, str]] = [
    (set_layers, "layers of a Step cannot be changed: loop over a part of it"),
    (set_micro_batches, "micro_batches of a Step cannot be changed"),
    (say_it_is_the_last, "last of a Step cannot be changed"),
    (forget_the_layers, "layers of a Step cannot be changed"),
    (replace_a_verb, "attention of a Step cannot be changed"),
    (set_layers_of_the_plan, "layers of a Plan cannot be changed: declare with the plan's methods"),
    (raise_a_budget, "capacity of a Memory cannot be changed"),
    (forget_a_memory, r"read-only: copy it first, with dict\(\.\.\.\): .* no attribute 'clear'"),
    (make_a_kernel_free, "read-only: copy it first"),
    (change_the_order_of_lanes, "discipline: the plan is made"),
    (keep_more, "keep: the plan is made and its memory reserved"),
    (close_the_step, "close: a step is closed once prefill or decode has ended: return instead"),
]


@pytest.mark.parametrize(("mistake", "says"), MISTAKES, ids=[each.__name__ for each, _ in MISTAKES])
def test_a_policy_that_changes_what_it_sees_is_refused_at_its_own_line(mistake: Mistake, says: str) -> None:
    error = refused(Meddling(mistake))
    assert re.search(says, str(error))
    assert policy_line(error) == f"{__file__}:{mistake.__code__.co_firstlineno + 1}"


def test_a_plan_whose_layers_are_cut_while_it_is_made_is_refused() -> None:
    class Cuts(Everything):
        def plan(self, plan: Plan) -> None:
            super().plan(plan)
            plan.layers = plan.layers[:2]

    assert "layers of a Plan cannot be changed" in str(refused(Cuts()))


@pytest.mark.parametrize(
    ("declare", "says"),
    [
        (
            lambda plan: plan.place_kv("vram"),
            "place_kv: 'vram' is no memory for that on machine t4: give 'accelerator' (gpu) or 'host'",
        ),
        (
            lambda plan: plan.place_kv("host", [-1]),
            "place_kv: there is no mb-1: micro-batches go from 0 to 1",
        ),
        (
            lambda plan: plan.keep(plan.layout.pages, "vram"),
            "keep: 'vram' is no memory for that on machine t4: give 'accelerator' (gpu) or 'host' or 'pinned'",
        ),
        (
            lambda plan: plan.pool("vram", "mine", 1, []),
            "pool: 'vram' is no memory for that on machine t4: give",
        ),
    ],
)
def test_a_memory_or_micro_batch_that_does_not_exist_is_refused(
    declare: Callable[[Plan], object], says: str
) -> None:
    class Declares(Everything):
        def plan(self, plan: Plan) -> None:
            declare(plan)

    assert says in str(refused(Declares()))


def test_a_layer_beyond_the_last_is_refused() -> None:
    class GoesOn(Everything):
        async def prefill(self, step: Step) -> None:
            step.embed(0)
            for i in range(len(step.layers) + 1):
                step.pre_attention(i, 0)
                step.attention(i, 0)
                step.post_attention(i, 0)

    assert "there are no weights of layer 3: loop over step.layers" in str(refused(GoesOn()))


def test_a_discipline_that_does_not_exist_is_refused() -> None:
    class Hasty(Everything):
        def plan(self, plan: Plan) -> None:
            plan.discipline = "hasty"  # type: ignore[assignment]

    assert "discipline is 'hasty': assign 'in_order' or 'ready_first'" in str(refused(Hasty()))


@pytest.mark.parametrize("clock", CLOCKS)
def test_the_chosen_experts_cannot_be_taken_out_while_they_run(clock: Clock) -> None:
    class TakesOut(Everything):
        async def run_experts(self, step: Step, i: int, j: int) -> None:
            routed: Any = await step.route(i, j)
            while routed:
                step.run_expert(i, routed.popitem()[0], j)

    assert "read-only: copy it first, with dict(...)" in str(refused(TakesOut(), clock))


def test_the_value_of_a_task_cannot_be_replaced() -> None:
    class Replaces(Everything):
        async def run_experts(self, step: Step, i: int, j: int) -> None:
            routing: Any = step.route(i, j)
            await routing
            routing.value = {}

    with pytest.raises(AttributeError, match="property 'value' of 'Decision' object has no setter"):
        run_on_symbols(policy := Replaces(), CASE.plan(policy))


def test_sampled_tokens_cannot_be_changed() -> None:
    class Improves(Everything):
        async def prefill(self, step: Step) -> None:
            for j in step.micro_batches:
                step.embed(j)
                for i in step.layers:
                    step.pre_attention(i, j)
                    step.attention(i, j)
                    step.post_attention(i, j)
                tokens: Any = await step.sample(j)
                tokens[0] = 7

        decode = prefill

    with pytest.raises(TypeError, match="'tuple' object does not support item assignment"):
        run_on_symbols(policy := Improves(), CASE.plan(policy))


def test_nothing_that_public_names_lead_to_can_be_changed() -> None:
    open_to_changes: list[str] = []
    seen: list[str] = []

    def look(step: Step, plan: Plan) -> None:
        for root, called in (
            (plan, "plan"),
            (step, "step"),
            (policy.pool, "pool"),
            (policy.resident, "kept"),
        ):
            for name, each in reachable(root, called):
                seen.append(name)
                if isinstance(each, (dict, list, set, deque)):
                    open_to_changes.append(f"{name} is a {type(each).__name__}")
                for key in attributes(each):
                    try:
                        setattr(each, key, getattr(each, key))
                    except (AttributeError, PolicyError, TypeError):
                        continue
                    open_to_changes.append(f"{name}.{key}")

    policy = Meddling(look)
    ended = run_on_symbols(policy, CASE.plan(policy))
    assert ended.tokens == ended.expected
    assert not open_to_changes
    assert {"plan.machine.links", "plan.weights.resident", "plan.reservations.sizes", "pool.memory"} <= {
        *seen
    }
    assert len(seen) > 100

"""Activations of micro-batches within a layer: rooms that prefill shares, and the bytes that a plan counts."""

from __future__ import annotations

from typing import Any

import pytest

from moesched.errors import OverBudget, PolicyError
from moesched.models.footprint import EXPERT_TILE, layer_bytes, workspace_bytes
from moesched.models.operations import Operations
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.policies.layer_streaming import LayerStreaming
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from runs import FORTY_PERCENT, make_plan, virtual_run

OPERATIONS = Operations(SHAPES["mixtral-0.8b"], "bfloat16")


@pytest.mark.parametrize("policy", ["cgopipe", "flexgen", "flexgen_cpu", "layer_streaming", "fastdecode"])
def test_no_more_micro_batches_are_within_a_layer_than_the_plan_has_room_for(policy: str) -> None:
    run = virtual_run(policy, requests=12, prompt=200, micro_batch_size=2, budgets=FORTY_PERCENT)
    spans: dict[tuple[int, int], list[int]] = {}
    for each in run.recording.slices:
        if each.step == 0 and each.task.verb in ("pre_attention", "post_attention", "offload_kv"):
            spans.setdefault((each.task.layer, each.task.micro_batch), []).extend((each.start, each.end))
    events = sorted(
        (at, change) for ends in spans.values() for at, change in ((min(ends), 1), (max(ends), -1))
    )
    within = most = 0
    for _, change in events:
        within += change
        most = max(most, within)
    assert run.plan.declared.in_flight == 2
    assert 1 <= most <= 2


class Wide(LayerStreaming):
    """Begins a layer for all micro-batches before it ends it for one."""

    def plan(self, plan: Plan) -> None:
        plan.limit_in_flight(3)
        plan.place_kv("accelerator")
        self.buffer = plan.pool("accelerator", "layers", 2 * len(plan.layout.layer(0)), plan.layout.pages)

    def _schedule(self, step: Step) -> None:
        for j in step.micro_batches:
            step.embed(j)
        for j in step.micro_batches:
            step.pre_attention(0, j)


class Undecided(LayerStreaming):
    """Declares two limits."""

    def plan(self, plan: Plan) -> None:
        super().plan(plan)
        plan.limit_in_flight(3)


def test_a_schedule_with_more_of_them_is_refused_at_its_own_line_and_two_limits_contradict_each_other() -> (
    None
):
    with pytest.raises(
        OverBudget, match=r"pre_attention: mb3 finds no room: .* within a layer to 3"
    ) as refused:
        virtual_run(Wide(), requests=8)
    assert any(entry.name == "_submit" for entry in refused.traceback)
    said = "limit_in_flight: the limit is 2 already: declare one limit, not 3"
    with pytest.raises(PolicyError, match=said):
        make_plan(Undecided(), requests=8)


def test_rooms_that_are_shared_leave_memory_for_weights() -> None:
    sizes: dict[str, Any] = {"requests": 64, "prompt": 400, "micro_batch_size": 4}
    shared = make_plan(make_policy("layer_streaming"), **sizes)
    each = make_plan(make_policy("expert_streaming"), **sizes)
    assert (shared.declared.in_flight, each.declared.in_flight) == (2, 16)
    reserved = [
        plan.memory("accelerator").used
        - sum(pool.nbytes for pool in (*plan.weights.pools, *plan.weights.resident))
        for plan in (shared, each)
    ]
    in_decode = 16 * layer_bytes(OPERATIONS, 4)
    assert reserved[1] - reserved[0] == 14 * layer_bytes(OPERATIONS, 4 * 400) - in_decode
    few, many = (
        workspace_bytes(OPERATIONS, tokens, 1, on_gpu=False) for tokens in (EXPERT_TILE, EXPERT_TILE + 100)
    )
    assert few == many, "the workspace of experts does not grow with the micro-batch"

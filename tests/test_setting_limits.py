"""Limits: policies run with the smallest budget that fits, and refuse settings that nothing can have."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesched.errors import BadInput
from moesched.jobs.simulate_model import simulate_model
from moesched.machines import load_machine
from moesched.models.config import ModelConfig
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.planner import plannable
from moesched.plugins import find
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.seams import Policy
from moesched.steps.plan import Plan

DENSE = SHAPES["mixtral-0.8b"].varied(name="dense", form="llama", experts=1, top_k=1)


@settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(plannable()),
    model=st.sampled_from([SHAPES["mixtral-0.8b"], DENSE, DENSE.varied(window=64)]),
    more=st.sampled_from([0, 1, 10**6, 10**8]),
    size=st.integers(1, 3),
)
def test_policies_run_over_the_edge_of_the_smallest_budget_that_fits(
    policy: str, model: ModelConfig, more: int, size: int
) -> None:
    machine, layout = load_machine("t4"), weight_layout(model)
    batch = split_batch([7, 3, 5, 2], 3, size)

    def planned(budget: int) -> tuple[Plan, Policy]:
        made = find("policies", policy)()
        return plan_run(machine, layout, batch, made, {"gpu": budget}), made

    def fits(budget: int) -> bool:
        try:
            planned(budget)
        except BadInput:
            return False
        return True

    least = bisect_left(range(4 * 10**9), True, key=fits)
    assert simulate(*planned(least + more)).peak_bytes["gpu"] <= least + more


@pytest.mark.parametrize(
    ("policy", "setting", "says"),
    [
        ("expert_cache", {"experts": 65}, "experts is 65, and mixtral-0.8b has 64 experts: give at most 64"),
        ("twiddler", {"experts": 10**6}, "experts is 1,000,000, and mixtral-0.8b has 64 experts"),
        ("layer_split", {"gpu_layers": 9}, "gpu_layers is 9, and mixtral-0.8b has 8 layers: give at most 8"),
        ("cgopipe", {"ahead": -1}, "ahead is -1: give 0 or more"),
        ("moe_gen", {"together": 0}, "together is 0: give 1 or more"),
        ("hybrimoe", {"buffers": 0}, "buffers is 0: give 1 or more"),
    ],
)
def test_a_setting_beyond_its_limits_is_bad_input(policy: str, setting: dict[str, int], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        simulate_model(
            "mixtral-0.8b",
            machine="t4",
            policy=policy,
            workload="mtbench",
            gen=2,
            batch_size=2,
            settings=setting,
        )

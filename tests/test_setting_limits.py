"""Limits: policies run with the smallest budget that fits, and refuse settings that nothing can have."""

from __future__ import annotations

from bisect import bisect_left

from hypothesis import given, settings
from hypothesis import strategies as st

from moesched.errors import BadInput
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

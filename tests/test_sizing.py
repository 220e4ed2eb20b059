"""Default sizes come from the planner; given sizes stay; policies run with the smallest budget that fits."""

from __future__ import annotations

from bisect import bisect_left

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import moesched
from moesched.errors import BadInput
from moesched.inputs.options import SizeOptions
from moesched.machines import Machine, load_machine
from moesched.machines.local import unified_machine
from moesched.models.config import ModelConfig
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.planner.search_policies import plannable
from moesched.planner.setting import Setting
from moesched.planner.sizing import choose_sizes
from moesched.plugins import find
from moesched.requests.batch import split_batch
from moesched.requests.batching import BatchSizes, batches_of
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.seams import Policy
from moesched.steps.plan import Plan
from runs import predicted, setting

pytestmark = pytest.mark.usefixtures("as_users_run")

T4 = load_machine("t4")
LAPTOP = unified_machine(
    "laptop", memory=10**10, disk=10**12, flops={"bfloat16": 1e11}, memory_bandwidth=1e10, disk_bandwidth=1e9
)
CACHE = 8192
"""Bytes of the KV cache for a token."""


def asking(
    policy: str, lengths: list[int], machine: Machine = LAPTOP, new_tokens: int = 4, **budgets: int
) -> Setting:
    return setting(
        policy, budgets, shape="mixtral-0.8b", lengths=lengths, machine=machine, new_tokens=new_tokens
    )


def test_all_prompts_run_together_where_they_fit() -> None:
    sizes = choose_sizes(asking("resident", [4] * 11))
    assert sizes[:2] == (11, 11), "one micro-batch reads the weights once"


def test_a_single_prompt_asks_nobody() -> None:
    assert choose_sizes(asking("cgopipe", [4], T4)) == BatchSizes(1, 1)


@settings(max_examples=5, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=2, max_size=30),
    tokens=st.integers(600, 4000),
    policy=st.sampled_from(["layer_streaming", "expert_streaming", "cgopipe"]),
)
def test_every_batch_of_the_chosen_sizes_fits(lengths: list[int], tokens: int, policy: str) -> None:
    where = asking(policy, lengths, host=560 * 10**6 + tokens * 3 * CACHE)
    batches = list(batches_of(lengths, 4, choose_sizes(where)))
    assert sum(len(batch.prompts) for batch in batches) == len(lengths)
    for batch in batches:
        where.plan(batch)


def test_a_cache_that_is_full_ends_a_batch() -> None:
    short_then_long = [16] * 40 + [400] * 40
    where = asking("layer_streaming", short_then_long, host=720 * 10**6)
    sizes = choose_sizes(where)
    first, *_, last = batches_of(short_then_long, 4, sizes)
    assert len(last.prompts) < len(first.prompts) <= sizes.batch_size
    assert sizes.cache_tokens is not None
    assert last.cache_tokens <= sizes.cache_tokens * sizes.micro_batches


def test_given_sizes_stay_as_they_are() -> None:
    where = asking("resident", [4] * 10)
    assert choose_sizes(where, SizeOptions(batch_size=6, micro_batch_size=2)) == BatchSizes(6, 2)
    assert choose_sizes(asking("resident", [4] * 3), SizeOptions(batch_size=6)) == BatchSizes(3, 3)
    assert choose_sizes(where, SizeOptions(micro_batch_size=3))[:2] == (10, 3)


def test_a_given_batch_is_cut_into_micro_batches_that_overlap_best() -> None:
    sizes = choose_sizes(asking("cgopipe", [64] * 96, T4, gpu=700 * 10**6), SizeOptions(batch_size=96))
    assert sizes.batch_size == 96
    assert sizes.micro_batches > 1, "the host attends for one while the accelerator computes for others"
    unified = choose_sizes(asking("resident", [64] * 96), SizeOptions(batch_size=96))
    assert unified == BatchSizes(96, 96)


def test_micro_batches_of_a_given_batch_get_smaller_until_it_fits() -> None:
    roomy = asking("layer_streaming", [2000] * 12, T4)
    plan, _ = roomy.plan(roomy.batch(4, 3))
    tight = asking("layer_streaming", [2000] * 12, T4, gpu=plan.memory("accelerator").used)
    tight = replace(tight, prefill_chunk=24_000)
    sizes = choose_sizes(tight, SizeOptions(batch_size=12))
    assert sizes.batch_size == 12
    assert sizes.micro_batch_size <= 3
    tight.plan(tight.batch(sizes.micro_batches, sizes.micro_batch_size))


def test_micro_batches_of_a_given_size_are_cut_into_chunks_where_they_fit_no_other_way() -> None:
    roomy = replace(asking("layer_streaming", [20_000] * 2, T4), prefill_chunk=512)
    plan, _ = roomy.plan(roomy.batch(1, 1))
    tight = asking("layer_streaming", [20_000] * 2, T4, gpu=plan.memory("accelerator").used)
    assert choose_sizes(tight, SizeOptions(micro_batch_size=1)).prefill_chunk == 512


def test_where_not_even_one_request_fits_it_says_by_how_many_bytes_of_what() -> None:
    with pytest.raises(BadInput, match=r"Resident does not fit: .* bytes of host, .* bytes too few"):
        choose_sizes(asking("resident", [4] * 8, host=10**9))


def test_a_simulation_without_sizes_runs_the_plan_and_reaches_what_it_predicts() -> None:
    budgets: dict[str, int | str] = {"gpu": "900MB", "host": "1700MB"}
    proposal = moesched.plan_model(
        "mixtral-0.8b", machine="t4", policy="cgopipe", gen=8, budgets=budgets, band=False
    )
    report = predicted("cgopipe", gen=8, budgets=budgets)
    assert report.plan.batch_size == proposal.plan.batch_size
    assert report.plan.micro_batch_size == proposal.plan.micro_batch_size
    assert report.peak_bytes == proposal.predicted.peak_bytes
    planned = proposal.predicted.throughput_tokens_per_second
    assert report.throughput_tokens_per_second == pytest.approx(planned, rel=0.02)


# -- the smallest budget that fits -----------------------------------------------------------------

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

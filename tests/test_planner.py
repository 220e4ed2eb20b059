"""The planner: its search against enumeration, its bounds against schedules, and what it says of what does not fit."""

from __future__ import annotations

from statistics import fmean
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.inputs.options import Objective
from moesched.machines import Machine, load_machine
from moesched.machines.cost import cost_model
from moesched.machines.sustained import at_peak
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.shapes import SHAPES
from moesched.planner.candidate import Candidate
from moesched.planner.chunks import CHUNK
from moesched.planner.proposal import plan_model
from moesched.planner.schedules import SchedulePoint, Schedules
from moesched.planner.search import best
from moesched.planner.search_policies import BestPlan, plan_best
from moesched.planner.setting import Setting
from moesched.planner.traits import MicroBatchCost, SizeOption, SizeProbe, TraitProbe, Traits
from moesched.planner.trial_run import trial_run
from moesched.policies.cgopipe import CGOPipe
from moesched.requests.workloads import load_workload
from moesched.runs.simulation import simulate
from moesched.steps.plan import Plan
from runs import predicted, setting

T4 = load_machine("t4")
pytestmark = pytest.mark.usefixtures("as_users_run")

LAYOUT = weight_layout(SHAPES["mixtral-8x7b"])
SMALL = weight_layout(SHAPES["mixtral-0.8b"])


# -- the search -------------------------------------------------------------------------------------------------------

LIKE_CGOPIPE = Traits(
    attention_on_gpu=False, ffn_on_gpu=True, kv_on_gpu=False, keeps=1.0, streams=True, buffer=2.0, fetch=0.1
)
seconds = st.floats(1e-5, 1e-2)


@st.composite
def shares(draw: st.DrawFn, gpu: int, host: int) -> MicroBatchCost:
    return MicroBatchCost(
        link=draw(seconds),
        host=draw(seconds),
        accelerator=draw(seconds),
        prefill=draw(seconds),
        nbytes={"gpu": draw(st.integers(10**8, gpu)), "host": draw(st.integers(10**7, host))},
    )


@st.composite
def options(draw: st.DrawFn) -> list[SizeOption]:
    return [
        SizeOption(
            size=size,
            most=12,
            shared={"gpu": draw(st.integers(10**9, 3 * 10**9)), "host": 10**10},
            each=draw(shares(gpu=10**9, host=3 * 10**10)),
            resident=draw(st.none() | shares(gpu=3 * 10**9, host=10**9)),
        )
        for size in (4, 16, 64)
    ]


@settings(max_examples=25, deadline=None)
@given(options=options(), buffer=st.floats(0, 3), fetch=st.floats(1e-3, 0.5))
def test_the_search_finds_what_trying_everything_finds(
    options: list[SizeOption], buffer: float, fetch: float
) -> None:
    traits = replace(LIKE_CGOPIPE, buffer=buffer, fetch=fetch)
    where = setting("cgopipe")
    tried = [
        one
        for option in options
        for count in range(1, 13)
        for resident in range(count + 1 if option.resident else 1)
        if (one := throughput(where, traits, option, count, resident))
    ]
    found = best(where, traits, options)
    assert (found is None) == (not tried)
    if found is not None:
        assert found.throughput == pytest.approx(max(tried), rel=2e-3)


@settings(max_examples=15, deadline=None)
@given(options=options(), share=st.floats(0, 1))
def test_the_search_keeps_to_a_share_of_the_kv_cache_that_is_given(
    options: list[SizeOption], share: float
) -> None:
    split = [option for option in options if option.resident]
    found = best(replace(setting("cgopipe"), kv_on_gpu=share), LIKE_CGOPIPE, split) if split else None
    if found is not None:
        assert abs(found.resident - share * found.micro_batches) <= 0.5 + 1e-6


def test_times_that_are_next_to_none_are_planned_with_too() -> None:
    nbytes = {"gpu": 10**8, "host": 10**8}
    quick = MicroBatchCost(link=1e-12, host=1e-12, accelerator=1e-3, prefill=1e-12, nbytes=nbytes)
    option = SizeOption(size=4, most=12, shared=nbytes, each=quick)
    where = setting("cgopipe")
    found = best(where, replace(LIKE_CGOPIPE, fetch=1e-12), [option])
    assert found is not None and found.throughput == pytest.approx(4 / (1e-3 * where.layout.config.layers))


def test_nothing_is_found_where_nothing_promises_more_than_is_asked_for() -> None:
    where = setting("cgopipe")
    sizes = [SizeProbe(where, size).option(where.cost) for size in (16, 32)]
    most = best(where, TraitProbe(where).traits, sizes)
    assert most is not None
    assert best(where, TraitProbe(where).traits, sizes, above=most.throughput) is None
    again = best(where, TraitProbe(where).traits, sizes, above=0.9 * most.throughput)
    assert again is not None and again.throughput == pytest.approx(most.throughput, rel=1e-3)


def throughput(where: Setting, traits: Traits, option: SizeOption, count: int, resident: int) -> float | None:
    """Tokens per second with `count` micro-batches and as many resident weights as fit; None if nothing fits."""
    layers = where.layout.config.layers
    weights = sum(page.nbytes for page in where.layout.pages)
    all_of_them = [option.each] * (count - resident)
    all_of_them += [option.resident] * resident if option.resident else []
    used = {
        memory: option.shared[memory] + sum(one.nbytes[memory] for one in all_of_them)
        for memory in option.shared
    }
    buffer = traits.buffer * weights / layers
    kept = (where.capacity("gpu") - used["gpu"] - buffer) / (weights - buffer)
    if kept < 0 or used["host"] > where.capacity("host"):
        return None
    fetching = traits.fetch * (1 - min(1.0, kept))
    busy = {
        lane: sum(getattr(one, lane) for one in all_of_them)
        for lane in ("link", "host", "accelerator", "prefill")
    }
    step = max(busy["link"] + fetching, busy["host"], busy["accelerator"])
    prefill = max(fetching, busy["prefill"])
    rate: float = where.new_tokens * option.size * count / (layers * (prefill + where.new_tokens * step))
    return rate


# -- what policies are like -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "attention_on_gpu", "kv_on_gpu", "keeps", "streams"),
    [
        ("cgopipe", False, False, 1, True),
        ("flexgen", True, False, 1, True),
        ("flexgen_cpu", False, False, 1, True),
        ("flexgen_pipeline", True, False, 1, True),
        ("layer_streaming", True, True, 0, True),
        ("resident", True, True, 1, False),
    ],
)
def test_what_a_policy_is_like_is_learned_from_its_plans(
    policy: str, attention_on_gpu: bool, kv_on_gpu: bool, keeps: float, streams: bool
) -> None:
    traits = TraitProbe(setting(policy)).traits
    assert traits.attention_on_gpu == attention_on_gpu
    assert traits.kv_on_gpu == kv_on_gpu
    assert traits.keeps == keeps
    assert traits.streams == streams
    if streams:
        assert traits.buffer == pytest.approx(2, rel=0.05), "all of them double-buffer what streams"


class Thrifty(CGOPipe):
    """A user's own policy, which leaves most of the GPU's memory alone."""

    def plan(self, plan: Plan) -> None:
        plan.memory("accelerator").reserve("something else", 10**9)
        super().plan(plan)


def test_a_users_own_policy_is_planned_for_like_those_that_ship() -> None:
    budgets = {"gpu": 2 * 10**9}
    theirs, ours = (
        plan_best(T4, SMALL, [100] * 16, 4, policies=[policy], budgets=budgets, band=False)
        for policy in (f"{__name__}:Thrifty", "cgopipe")
    )
    assert theirs.schedule.throughput < ours.schedule.throughput
    assert theirs.schedule.peak_bytes["gpu"] <= budgets["gpu"]


def test_a_micro_batch_takes_the_bytes_of_all_layers_wherever_its_cache_is() -> None:
    where = replace(setting("cgopipe"), make=CGOPipe, splits_kv=True)
    option = SizeProbe(where, 16).option(where.cost)
    reservations = where.undecided(where.batch(5, 16)).reservations
    cache = reservations.cache_bytes([0], range(LAYOUT.config.layers))
    rows = reservations.sizes.host_rows([0], routed=False)
    assert option.resident is not None
    assert option.resident.nbytes["gpu"] - option.each.nbytes["gpu"] == cache
    assert option.each.nbytes["host"] - option.resident.nbytes["host"] == cache + rows


def test_a_workload_whose_first_prompts_are_its_longest_is_planned_too() -> None:
    lengths, policies = [2000] * 16 + [20] * 240, ["layer_streaming"]
    found = plan_best(T4, SMALL, lengths, 8, policies=policies, budgets={"gpu": 10**9}, band=False)
    assert found.schedule.batch_size >= 64


# -- a look at a schedule ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["cgopipe", "flexgen", "layer_streaming"])
def test_a_look_at_a_schedule_tells_what_all_of_it_comes_to(policy: str) -> None:
    where = setting(policy, new_tokens=40)
    batch = where.batch(4, 32)
    plan, chosen = where.plan(batch)
    seen = trial_run(plan, chosen, where.cost)
    whole = simulate(*where.plan(batch))
    assert seen.tokens_per_second(batch) == pytest.approx(whole.throughput_tokens_per_second, rel=0.005)
    assert seen.prefill_seconds == pytest.approx(whole.prefill_seconds, rel=1e-9)


# -- plans ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def best_on_t4() -> BestPlan:
    return plan_best(
        at_peak(T4),
        LAYOUT,
        load_workload("mtbench").lengths(256, seed=0),
        32,
        policies=["resident", "cgopipe", "flexgen", "layer_streaming"],
        band=False,
    )


def test_the_plan_for_mixtral_on_a_t4_streams_weights_and_attends_on_the_host(best_on_t4: BestPlan) -> None:
    assert best_on_t4.ranking[0].policy == "cgopipe"
    assert (best_on_t4.attention_on_gpu, best_on_t4.ffn_on_gpu) == (False, True)
    assert best_on_t4.bound_by in ("accelerator", "host->gpu")
    schedule = best_on_t4.schedule
    assert schedule.trial_run.utilization["host->gpu"] > 0.75
    assert schedule.throughput <= schedule.bound
    assert [row.policy for row in best_on_t4.ranking if not row.fits] == ["resident"]
    assert all(peak <= T4.memories[memory].nbytes for memory, peak in schedule.peak_bytes.items())


def test_where_everything_fits_weights_stay() -> None:
    found = plan_best(load_machine("h200"), SMALL, [100] * 64, 4, policies=["cgopipe"], band=False)
    assert found.schedule.weights_on_gpu == 1


def test_it_says_what_more_of_each_resource_would_buy(best_on_t4: BestPlan) -> None:
    gains = {gain.resource: gain.share for gain in best_on_t4.gains}
    assert gains["host->gpu bandwidth"] > 0 and gains["gpu capacity"] > 0
    assert gains["cpu FLOP/s"] == 0, "the host is idle most of the time"


def test_where_one_token_is_generated_the_busiest_lane_and_the_gains_are_those_of_the_prefill() -> None:
    proposal = plan_model(
        "mixtral-0.8b", machine="m2-ultra", objective="interactive", gen=1, policy="resident", band=False
    )
    assert proposal.predicted.utilization[proposal.predicted.bound_by] > 0.5
    assert max(gain.share for gain in proposal.gains) > 0.05


def test_a_memory_that_two_processors_share_is_one_resource() -> None:
    best = plan_best(load_machine("m2-ultra"), LAYOUT, (100, 100), 2, policies=("resident",), band=False)
    assert [gain.resource for gain in best.gains].count("unified bandwidth") == 1


def test_a_model_that_does_not_fit_is_refused_by_how_many_bytes_of_what() -> None:
    policies = ["cgopipe", "flexgen", "layer_streaming"]
    with pytest.raises(BadInput, match=r"bytes of host.* too few; they can come from a disk") as refused:
        plan_best(T4, LAYOUT, [100], 8, policies=policies, budgets={"host": 50 * 10**9})
    assert str(refused.value).count("all weights") == 1, "the same reason is given once"


# -- bounds ------------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    policy=st.sampled_from(
        ["cgopipe", "expert_cache", "hybrimoe", "twiddler", "layer_split", "layer_streaming"]
    ),
    layout=st.sampled_from([weight_layout(SHAPES[name]) for name in ("mixtral-0.8b", "olmoe-1b-7b")]),
    machine=st.sampled_from([load_machine(name) for name in ("t4", "rtx6000", "m2-ultra")]),
    objective=st.sampled_from(get_args(Objective)),
    size=st.integers(1, 8),
    count=st.integers(1, 3),
    new_tokens=st.integers(2, 40),
)
def test_a_bound_is_never_below_what_is_predicted(
    policy: str,
    layout: WeightLayout,
    machine: Machine,
    objective: Objective,
    size: int,
    count: int,
    new_tokens: int,
) -> None:
    where = replace(
        setting(policy, lengths=(100,) * 24, new_tokens=new_tokens),
        layout=layout,
        machine=machine,
        cost=cost_model(machine, "bfloat16"),
        objective=objective,
    )
    schedule = Schedules(where).at(SchedulePoint(size, count))
    assert schedule.throughput <= schedule.bound


def test_a_few_layers_have_room_for_the_copies_that_all_layers_have_room_for() -> None:
    where = setting("layer_split", new_tokens=32, lengths=(418,) * 128)
    few, whole = (Schedules(where).at(SchedulePoint(32, 4), deep=deep).trial_run for deep in (False, True))
    assert few.tasks < whole.tasks
    assert few.prefill_seconds == pytest.approx(whole.prefill_seconds, rel=0.05)
    assert few.step_seconds == pytest.approx(whole.step_seconds, rel=0.05)


# -- the table and a simulation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "objective"),
    [("cgopipe", "interactive"), ("expert_cache", "throughput"), ("layer_split", "interactive")],
)
def test_a_row_has_the_figures_that_a_simulation_of_its_sizes_has(policy: str, objective: Objective) -> None:
    budgets = {"gpu": "900MB", "host": "1700MB"}
    wanted: dict[str, Any] = {"workload": "uniform", "gen": 24, "budgets": budgets, "band": False}
    [row] = plan_model("mixtral-0.8b", machine="t4", policy=policy, objective=objective, **wanted).ranking
    assert not row.estimate
    report = predicted(policy, batch_size=row.batch_size, micro_batch_size=row.micro_batch_size, **wanted)
    assert report.throughput_tokens_per_second == pytest.approx(row.throughput_tokens_per_second, rel=0.03)
    assert fmean(report.step_seconds[1:]) == pytest.approx(row.decode_step_seconds, rel=0.03)
    assert report.first_token_seconds == pytest.approx(row.first_token_seconds, rel=0.03)


@pytest.mark.parametrize("chunk", [CHUNK, 512])
def test_a_prompt_that_fits_only_in_chunks_is_planned_in_the_largest_that_fit(chunk: int) -> None:
    roomy = setting("layer_streaming", lengths=(20_000,), new_tokens=2)
    cut = replace(roomy, prefill_chunk=chunk)
    plan, _ = cut.plan(cut.batch(1, 1))
    tight = replace(roomy, budgets=roomy.budgets | {"gpu": plan.memory("accelerator").used})
    assert not tight.fits(tight.batch(1, 1))
    assert Candidate("layer_streaming", tight).first_trial().chunk == chunk


def test_long_prompts_pass_in_chunks_where_that_leaves_room_for_more_requests() -> None:
    where = setting("twiddler", lengths=(2048,) * 128, new_tokens=32)
    whole = replace(where, prefill_chunk=2048 * 256)
    assert (
        Candidate("twiddler", where).first_trial().rate
        > 1.05 * Candidate("twiddler", whole).first_trial().rate
    )

"""The plan of a server: capacity and policy, which a prediction shares with the server that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import moesched
from benchmarks.shared.small_runs import TWO_MEMORIES
from moesched.cli.serve import chosen
from moesched.devices.lagging.device import LaggingDevice
from moesched.errors import BadInput
from moesched.inputs.defaults import POLICY
from moesched.jobs.options import PlannedOptions
from moesched.jobs.served_model import served_model
from moesched.jobs.served_options import ServedOptions
from moesched.jobs.serving_plan import ServingPlan, context_of, plan_serving, require_plan, serving_job
from moesched.machines import load_machine
from moesched.models.shapes import SHAPES
from moesched.planner.search_policies import plannable
from moesched.runs.service_report import ServiceReport
from moesched.server.messages import Ready
from small_models import SMALL, small_model

T4 = load_machine("t4")
WIDE = SMALL.varied(intermediate=384, experts=8)
"""A model whose experts are most of its weights."""
LITTLE = {"gpu": "6MB"}
"""Some of these fit beside the activations of prompts."""


def planned(policy: str = POLICY, context: int = 64, **more: Any) -> ServingPlan:
    given = PlannedOptions(machine=T4, policy=policy, **more)
    job = serving_job(given, WIDE, T4)
    return plan_serving(job, context)


def burst(folder: Path, **more: Any) -> ServiceReport:
    """The prediction of 16 requests that come at once, in little memory."""
    return moesched.simulate_arrivals(
        folder,
        machine=T4,
        workload=[[1] * 32] * 16,
        gen=32,
        arrivals="poisson:1000000",
        requests=16,
        budgets=LITTLE,
        dtype="bfloat16",
        **more,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models") / "wide", config=WIDE)


def test_a_server_and_its_prediction_have_the_same_capacity(folder: Path) -> None:
    sizes: dict[str, Any] = {
        "policy": "cgopipe",
        "machine": "auto",
        "batch_size": 6,
        "micro_batch_size": 2,
        "context": 96,
    }
    report = moesched.simulate_arrivals(
        folder, workload=[[1] * 5] * 3, gen=4, arrivals="poisson:10", requests=3, **sizes
    )
    with served_model(ServedOptions(model=folder, **sizes)) as served:
        assert served.planned.capacity == report.capacity
    assert (report.capacity.places, report.capacity.sequences, report.capacity.context) == (3, 2, 96)


def test_where_all_weights_fit_the_planner_moves_nothing() -> None:
    found = planned()
    assert found.policy_name == "resident"
    assert found.predicted is not None
    assert found.capacity == planned("resident").capacity


def test_in_little_memory_no_other_policy_serves_faster_than_the_planners_choice(folder: Path) -> None:
    with pytest.raises(BadInput, match="Resident does not fit"):
        planned("resident", budgets=LITTLE)
    choice = burst(folder)
    assert choice.policy in plannable()
    for other in ("layer_split", "expert_cache", "cpu_ffn"):
        assert burst(folder, policy=other).tokens_per_second <= choice.tokens_per_second


def test_where_no_policy_fits_the_missing_bytes_are_named() -> None:
    with pytest.raises(BadInput, match=r"would fit with .* more gpu"):
        planned(budgets={"gpu": "1KB"})


@pytest.mark.parametrize("policy", [POLICY, "resident"])
def test_where_only_fewer_requests_fit_the_remedies_are_those_of_a_server(policy: str) -> None:
    with pytest.raises(BadInput, match=r"lower --batch-size or --context, or choose another policy$"):
        planned(policy, context=512, batch_size=32, budgets={"gpu": "8MB", "host": "7MB"})


CUT = {"context": 2048, "batch_size": 4, "micro_batch_size": 2}
"""Two places with prompts of up to 2,047 tokens."""


@pytest.mark.parametrize(
    ("policy", "asked", "chunk"),
    [
        ("resident", None, 512),
        ("resident", 99, 50),
        ("expert_streaming", None, 0),
        ("expert_streaming", 100, 50),
        ("cgopipe", None, 0),
    ],
)
def test_prompts_are_cut_where_weights_and_cache_stay_or_where_that_is_asked_for(
    policy: str, asked: int | None, chunk: int
) -> None:
    found = planned(policy, prefill_chunk=asked, **CUT)
    assert (found.capacity.places, found.capacity.chunk) == (2, chunk)
    assert found.plan.batch == found.capacity.fullest()


def test_a_policy_with_the_cache_on_the_host_is_refused_if_cut_prompts_are_asked_for() -> None:
    with pytest.raises(BadInput, match="--prefill-chunk 99 cuts prompts over steps, and the plan has the KV"):
        planned("cgopipe", prefill_chunk=99, **CUT)


def test_memory_is_reserved_for_parts_of_prompts_and_not_for_the_longest() -> None:
    machine, config = load_machine("m2-ultra"), SHAPES["mixtral-8x7b"]
    given = PlannedOptions(machine=machine, policy="resident", batch_size=4)
    job = serving_job(given, config, machine)
    found = plan_serving(job, 32_768)
    whole, _ = job.plan(replace(found.capacity, chunk=0).fullest())
    cut, long = (
        sum(each.nbytes for each in plan.reservations.of(plan.declared) if each.content == "buffers")
        for plan in (found.plan, whole)
    )
    assert 8 * cut < long


def test_settings_need_the_policy_that_they_are_for() -> None:
    with pytest.raises(
        BadInput, match="settings such as ahead are those of one policy: name it with --policy"
    ):
        planned(settings={"ahead": 3})


def test_a_context_beyond_the_models_is_refused() -> None:
    assert context_of(None, 77, SMALL) == 77
    with pytest.raises(
        BadInput, match="--context is 200,001, and that of small is 200,000: give at most that"
    ):
        context_of(200_001, 77, SMALL)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"policy": "nonsense"}, "unknown policy 'nonsense'"),
        ({"machine": "t5"}, "no machine 't5'"),
        ({"policy": "resident", "budgets": {"gpu": "1GB"}}, "--budget names 'gpu'"),
        ({"budgets": {"host": "1MB"}}, "does not fit .* or --context"),
    ],
    ids=["a policy", "a machine", "a memory", "the weights"],
)
def test_what_needs_no_device_is_refused_before_it_is_opened(
    folder: Path, more: dict[str, Any], why: str
) -> None:

    with pytest.raises(BadInput, match=why):
        require_plan(ServedOptions(folder, **more), WIDE, 64)


@pytest.mark.parametrize(
    ("predicted", "words"),
    [
        (None, ""),
        (4910.7, ", the planner's choice (4,911 tokens/s predicted with 16 requests at once),"),
        (0.1234, ", the planner's choice (0.123 tokens/s predicted with 16 requests at once),"),
    ],
)
def test_the_first_line_says_what_the_planner_chose_and_predicts(predicted: float | None, words: str) -> None:
    assert chosen(Ready("m", "cgopipe", predicted, "t4", 4, 4, 1024, 512, 256, 100)) == words


@pytest.mark.parametrize("triton", [True, False])
def test_a_server_plans_for_a_device_that_replays_kernels(folder: Path, triton: bool) -> None:
    settings = {"triton": triton}
    given = ServedOptions(
        folder, policy="resident", machine=TWO_MEMORIES, device=LaggingDevice, device_settings=settings
    )
    with served_model(given) as served:
        assert served.planned.plan.machine.accelerator.replays is triton

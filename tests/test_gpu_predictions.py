"""Predictions of runs on a GPU: a machine file with the times of their tasks gives the steps that they made."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest
from msgspec.structs import replace

from moesched.jobs.options import SimulationOptions
from moesched.jobs.report import JobReport
from moesched.jobs.scenario import Scenario
from moesched.jobs.simulate_model import simulate_scenario
from moesched.machines import Contention, CostPoint, Machine, load_machine
from moesched.machines.cost import cost_model
from moesched.machines.estimates import Estimate
from moesched.models.shapes import SHAPES
from moesched.requests.workloads import Workload
from moesched.work import Work, WorkPart

H100 = load_machine(str(Path(__file__).parent / "machines" / "h100-pageable.toml"))
FOUR_LAYERS = SHAPES["mixtral-8x7b"].varied(layers=4)
NEW_TOKENS = 12

STEPS = {
    "cgopipe": (1.717, 1.355, 1.400, 1.310, 1.272, 1.304, 1.280, 1.323, 1.352, 1.500, 1.502),
    "layer_streaming": (0.849, 1.200, 1.219, 1.217, 1.225, 1.224, 1.235, 1.153, 1.116, 1.163, 1.221),
    "flexgen": (1.701, 1.507, 1.440, 1.365, 1.367, 1.409, 1.426, 1.445, 1.453, 1.389, 1.139),
}
"""Seconds of decode steps, measured on that H100: 512 requests of 77 tokens in micro-batches of 64, with 8 GB."""
RESIDENT_STEPS = {64: (0.0237, 0.0234, 0.0249, 0.0249, 0.0246, 0.0252, 0.0241, 0.0215), 1: (0.0128,)}
"""The same with all weights on the GPU, by requests at a time: the mean decode step of each batch."""


def predicted(
    policy: str, requests: int, machine: Machine = H100, *, band: bool = False, **options: Any
) -> JobReport:
    workload = Workload(name="77 tokens", prompt_tokens=(77,) * requests, new_tokens=(NEW_TOKENS,))
    given = SimulationOptions(
        FOUR_LAYERS.name,
        workload=workload,
        policy=policy,
        machine=machine,
        batch_size=requests,
        micro_batch_size=64,
        band=band,
        **options,
    )
    return simulate_scenario(Scenario(FOUR_LAYERS, machine, workload, None), given)


@pytest.mark.parametrize("policy", STEPS)
def test_steps_of_streaming_runs_are_those_that_were_measured(policy: str) -> None:
    report = predicted(policy, 512, budgets={"gpu": "8GB"})
    steps = report.step_seconds[1:]
    assert median(steps) == pytest.approx(median(STEPS[policy]), rel=0.15)
    assert sum(steps) == pytest.approx(sum(STEPS[policy]), rel=0.15)


@pytest.mark.parametrize("requests", RESIDENT_STEPS)
def test_steps_with_resident_weights_are_those_that_were_measured(requests: int) -> None:
    report = predicted("resident", requests)
    assert median(report.step_seconds[1:]) == pytest.approx(median(RESIDENT_STEPS[requests]), rel=0.15)


# -- the cost model --------------------------------------------------------------------------------


def seconds(work: Work, machine: Machine = H100) -> float:
    return cost_model(machine, "bfloat16").work(work).seconds


def experts(count: float, rows: float = 16.0) -> Work:
    return Work("post_attention", "gpu", parts=(WorkPart("experts", 352321536, rows, count),))


def test_kernels_that_are_short_take_as_long_as_to_start_them() -> None:
    assert seconds(experts(2)) == pytest.approx(1.333e-3)
    assert seconds(experts(5)) == pytest.approx((1.333e-3 + 4.038e-3) / 2)


def test_a_gpu_that_replays_starts_a_task_by_one_launch_and_a_fixed_step_by_its_first_task() -> None:
    gpu = replace(H100.processors["gpu"], replays=True)
    replaying = replace(H100, processors={**H100.processors, "gpu": gpu})
    first, joining = (Work("embed", "gpu", tokens=1, joins=joins) for joins in (False, True))
    assert 0 == seconds(joining, replaying) < seconds(first, replaying) < seconds(first)
    assert predicted("resident", 1, replaying).step_seconds[-1] < min(RESIDENT_STEPS[1]) / 2


def test_kernels_that_are_long_take_as_long_as_they_run() -> None:
    assert seconds(experts(8, 1232)) == pytest.approx(8 * 5.2e-3)


def test_attention_on_the_host_starts_first_and_then_runs() -> None:
    parts = (WorkPart("attention", 0), WorkPart("attention call", 0), WorkPart("step attention", 1e5, 8, 64))
    alone = seconds(Work("cpu_attention", "cpu", 0.0, 65e6, 64, parts))
    assert alone == pytest.approx(1.24e-3 + 65e6 / (0.25 * 130e9))


def test_a_copy_of_a_kind_that_was_not_measured_takes_the_links_time() -> None:
    assert seconds(Work("load_routed", "host->gpu", nbytes=9.44e9)) == pytest.approx(1.0)
    assert seconds(Work("load_kv", "host->gpu", nbytes=9.44e9)) == pytest.approx(1.00134)


def test_host_and_copies_slow_each_other_as_measured_and_kernels_on_the_gpu_slow_nothing() -> None:
    slower = Contention(work="attention", beside="host->gpu", rate=0.8)
    cost = cost_model(replace(H100, contention=[slower]), "bfloat16")
    parts = (WorkPart("attention", 0), WorkPart("attention call", 0, times=3))
    attending = cost.work(Work("cpu_attention", "cpu", 0.0, 1e6, 64, parts))
    copying = cost.work(Work("host->gpu", "host->gpu", nbytes=1e6))
    computing = cost.work(experts(8))
    assert dict(attending.slowed)[copying.work_class] == 0.8
    assert (computing.work_class, computing.slowed) == ("", ())
    assert attending.shares == copying.shares == computing.shares == ()


# -- the band --------------------------------------------------------------------------------------


def with_spread(machine: Machine) -> Machine:
    """The machine, with speeds of products and dispatch that were 20 % apart."""
    apart = Estimate(low=0.9, expected=1.0, high=1.1)
    return replace(machine, spread={"product": apart, "dispatch": apart})


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_runs_with_rates_within_their_spread_are_inside_the_band(factor: float) -> None:
    known = with_spread(H100)
    links = [
        replace(link, bandwidth=link.bandwidth * (link.sustained.low if factor < 1 else link.sustained.high))
        for link in known.links
        if link.sustained
    ]
    table = [replace(point, seconds=point.seconds / factor) for point in known.cost_table]
    for policy, requests, budgets in (("cgopipe", 512, {"gpu": "8GB"}), ("resident", 64, {})):
        band = predicted(policy, requests, known, budgets=budgets, band=True).band
        assert band is not None
        low, _, high = band["throughput_tokens_per_second"]
        actual = predicted(policy, requests, replace(known, links=links, cost_table=table), budgets=budgets)
        assert low < actual.throughput_tokens_per_second < high, policy


def test_the_dispatch_of_tasks_widens_the_band_of_runs_that_wait_for_it() -> None:
    report = predicted("resident", 64, with_spread(H100), band=True)
    assert report.widest_rate == "measured: dispatch"


def test_the_table_of_a_gpu_tells_its_products_from_those_of_the_host() -> None:
    slow = CostPoint(operation="product", resource="cpu", dtype="bfloat16", size=352321536, seconds=1.0)
    on_host = Work("expert at host", "cpu", parts=(WorkPart("expert", 352321536, 1),))
    machine = replace(H100, cost_table=[*H100.cost_table, slow])
    assert seconds(on_host, machine) > 1.0
    assert seconds(experts(1, 1), machine) < 0.01

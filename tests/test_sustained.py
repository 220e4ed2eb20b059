"""Sustained rates: what kernels and copies reach of the rates that a machine states."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from moesched.drivers.sharing import fair_rates
from moesched.inputs.lookup import find_shape
from moesched.machines import Machine, load_machine, machine_names
from moesched.machines.estimates import Estimate
from moesched.machines.roofline import Roofline
from moesched.machines.staging import staged
from moesched.machines.sustained import (
    at_peak,
    class_names,
    device_class,
    groups,
    link_kind,
    rates_of,
    sustained_share,
)
from moesched.models.layout import weight_layout
from moesched.planner.trial_run import trial_run
from moesched.plugins import make_policy
from moesched.requests.batch import Batch, split_batch
from moesched.runs.planning import plan_run
from moesched.steps.contention import lanes_contend
from moesched.tasks import PageTransfer
from moesched.work import Work, WorkPart
from runs import Ended

T4 = load_machine("t4")
STAGED_T4 = staged(T4, "16GB")
GB = 1_000_000_000
GPU = device_class("turing-gpu").rates
HOST = device_class("server-cpu").rates


def at(machine: Machine, work: Work) -> float:
    return Roofline(machine, "bfloat16").work(work).seconds


def product(rows: float, kind: str = "post_attention") -> Work:
    weights = GB
    parts = (WorkPart("route", weights, rows),)
    return Work(kind, "gpu", flops=weights * rows, nbytes=weights, parts=parts)


# -- classes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", class_names())
def test_every_rate_of_a_class_is_in_order_and_has_a_source(name: str) -> None:
    for estimate in device_class(name).rates.values():
        assert estimate.low <= estimate.expected <= estimate.high
        assert estimate.source


@pytest.mark.parametrize("name", class_names())
def test_no_class_sustains_more_than_a_machine_states(name: str) -> None:
    rates = device_class(name).rates
    assert max(each.high for key, each in rates.items() if not key.endswith("seconds")) <= 1


def test_a_processor_may_know_better_than_its_class() -> None:
    better = Estimate(low=0.8, expected=0.85, high=0.9)
    processor = replace(T4.accelerator, rates={"weights": better})
    assert rates_of(processor) == {**GPU, "weights": better}


@pytest.mark.parametrize("name", machine_names())
def test_a_shipped_machine_has_a_class_for_all_its_processors_or_for_none(name: str) -> None:
    processors = load_machine(name).processors.values()
    assert len({bool(each.device_class) for each in processors}) == 1


# -- kernels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["turing-gpu", "power-limited-gpu", "data-center-gpu"])
@pytest.mark.parametrize("rows", [1, 64, 640])
def test_reading_waits_for_the_share_of_computing_that_takes_all_the_power(name: str, rows: int) -> None:
    free = replace(
        T4.accelerator,
        device_class=name,
        rates={"launch_seconds": Estimate(low=1e-12, expected=1e-12, high=1e-12)},
    )
    machine = replace(T4, processors=T4.processors | {"gpu": free})
    rates, turns = device_class(name).rates, device_class(name).turns
    computing = GB * rows / (65e12 * rates["products"].expected)
    reading = GB / (320 * GB * rates["weights"].expected)
    assert at(machine, product(rows)) == pytest.approx(max(computing, reading + turns * computing), rel=1e-6)


def test_a_product_of_more_rows_costs_a_whole_tile() -> None:
    assert at(T4, product(2)) == at(T4, product(64)) < at(T4, product(65))


def test_at_peak_reading_and_computing_overlap_and_no_tile_is_counted() -> None:
    assert at(at_peak(T4), product(128)) == pytest.approx(GB / (320 * GB) + 5e-6)


def test_attention_has_rates_of_its_own() -> None:
    parts = (WorkPart("step attention", GB),)
    work = Work("attention", "gpu", nbytes=GB, parts=parts)
    assert at(T4, work) == pytest.approx(GB / (320 * GB * GPU["attention"].expected), rel=0.01)


def test_a_new_kind_of_attention_is_attention_and_a_new_projection_a_product() -> None:
    latent = Work("attention", "gpu", nbytes=GB, parts=(WorkPart("latent attention", GB),))
    known = Work("attention", "gpu", nbytes=GB, parts=(WorkPart("step attention", GB),))
    down = Work("pre_attention", "gpu", GB, GB, parts=(WorkPart("down_projection", GB, 1),))
    projection = Work("pre_attention", "gpu", GB, GB, parts=(WorkPart("pre_attention", GB, 1),))
    assert at(T4, latent) == at(T4, known)
    assert at(T4, down) == at(T4, projection)


def test_the_host_waits_for_the_routers_choice() -> None:
    waits = at(T4, product(1, "route")) - at(T4, product(1))
    assert waits == pytest.approx(GPU["host_seconds"].expected)


def test_each_expert_starts_its_own_kernels() -> None:
    one = Work("run_expert", "gpu", parts=(WorkPart("expert", 1, 0, 1),))
    eight = Work("run_expert", "gpu", parts=(WorkPart("expert", 1, 0, 8),))
    assert at(T4, eight) == pytest.approx(8 * at(T4, one)) == 40 * GPU["launch_seconds"].expected


def test_experts_in_one_call_start_its_kernels_once_however_many_rows_each_has() -> None:
    few, many = WorkPart("experts", 1, 1, 7), WorkPart("experts", 1, 9, 1)
    alike = Work("post_attention", "gpu", parts=(few._replace(times=8),))
    assert at(T4, Work("post_attention", "gpu", parts=(few, many))) == at(T4, alike)


def test_a_team_of_threads_wakes_once_for_a_task_and_meets_after_each_kernel() -> None:
    small = Work("run_expert", "cpu", parts=(WorkPart("expert", 1, 0, 8),))
    experts, kernels = 8, 5
    assert HOST["wake_seconds"].expected == 15e-6
    assert HOST["launch_seconds"].expected == 2e-6
    assert at(T4, small) == pytest.approx(15e-6 + experts * kernels * 2e-6) == pytest.approx(95e-6)


def test_an_expert_that_joins_a_call_starts_nothing() -> None:
    parts = (WorkPart("expert", GB, 1),)
    for processor, start in (("gpu", 5 * 6e-6), ("cpu", 15e-6 + 5 * 2e-6)):
        first, next_one = (
            Work("run_expert", processor, GB, GB, 1, parts, joins=joins) for joins in (False, True)
        )
        assert at(T4, first) - at(T4, next_one) == pytest.approx(start)


def test_a_cpu_converts_blocks_of_weights_without_its_matrix_units() -> None:
    """A Xeon has 16 times the FLOP/s in 16 bits; kernels of quantised weights do not use them."""
    xeon = replace(T4.host, flops={"bfloat16": 16e12, "float32": 1e12})
    machine = replace(T4, processors=T4.processors | {"cpu": xeon})
    plain, quantised = (
        at(machine, Work("route", "cpu", 1e15, 0, parts=(WorkPart("route", GB, 10**6),), kernel_rate=rate))
        for rate in (1.0, 0.999)
    )
    assert quantised == pytest.approx(16 * plain, rel=0.01)


def test_sampling_takes_what_the_host_does_between_steps() -> None:
    between = at(T4, product(1, "sample")) - at(T4, product(1))
    assert between == pytest.approx(GPU["step_seconds"].expected) == pytest.approx(500e-6)
    stated = at_peak(T4)
    assert at(stated, product(1, "sample")) == at(stated, product(1))


# -- copies ----------------------------------------------------------------------------------------


def kinds(machine: Machine) -> dict[tuple[str, str], str]:
    return {(link.source, link.destination): link_kind(machine, link) for link in machine.links}


def test_copies_are_told_apart_by_the_memories_that_they_join() -> None:
    nvme = load_machine("t4-nvme")
    assert kinds(nvme) == {
        ("host", "gpu"): "pinned",
        ("gpu", "host"): "pinned",
        ("disk", "host"): "disk",
        ("disk", "gpu"): "disk",
    }
    assert kinds(staged(nvme, "8GB")) == {
        ("pinned", "gpu"): "pinned",
        ("host", "gpu"): "pageable",
        ("gpu", "host"): "pageable",
        ("host", "pinned"): "host_copies",
        ("disk", "pinned"): "disk",
        ("disk", "host"): "disk",
        ("disk", "gpu"): "disk",
    }


def test_pageable_copies_are_slower_than_pinned_ones() -> None:
    machine = staged(T4, "16GB", ring=False)
    pinned, pageable = (
        sustained_share(machine, machine.link(source, "gpu"), {}) for source in ("pinned", "host")
    )
    assert pageable < pinned == 1
    assert sustained_share(machine, machine.link("host", "gpu"), {"pageable": "low"}) < pageable


def test_a_machine_without_classes_is_taken_at_its_word() -> None:
    stated = at_peak(T4)
    assert [sustained_share(stated, link, {}) for link in stated.links] == [1.0] * len(stated.links)


def test_processors_of_one_class_share_their_groups_of_rates() -> None:
    both = replace(T4.accelerator, device_class="server-cpu")
    machine = replace(T4, processors={"gpu": both, "cpu": T4.host})
    assert {name for name in groups(machine) if "." in name} == {
        f"server-cpu.{rate}" for rate in device_class("server-cpu").rates
    }


# -- the host's memory -----------------------------------------------------------------------------


def speeds(*works: Work, machine: Machine = T4) -> tuple[float, ...]:
    """The speeds of works that run at once, relative to running alone."""
    cost = Roofline(machine, "bfloat16")
    return fair_rates([cost.work(work) for work in works])


EXPERTS_ON_HOST = Work("run_expert", "cpu", nbytes=57 * GB, parts=(WorkPart("expert", 57 * GB, 1),))
STAGING = Work("stage", "host->pinned", nbytes=13 * GB)
FETCH = Work("fetch", "pinned->gpu", nbytes=12 * GB)
DIRECT_FETCH = Work("fetch", "host->gpu", nbytes=12 * GB)


def test_copies_take_bandwidth_from_experts_on_the_host() -> None:
    """Experts read 57 GB/s. Staging reads and writes 13, and the link reads 12, of 80 GB/s in all."""
    together = 80 / (57 + 2 * 13 + 12)
    at_once = speeds(EXPERTS_ON_HOST, STAGING, FETCH, machine=STAGED_T4)
    assert at_once == pytest.approx([together] * 3, rel=0.005)
    assert speeds(EXPERTS_ON_HOST, DIRECT_FETCH) == (1, 1)


def test_attention_on_the_host_leaves_room_for_copies() -> None:
    attention = Work("attention", "cpu", nbytes=35 * GB, parts=(WorkPart("step attention", GB),))
    assert speeds(attention, STAGING, FETCH, machine=STAGED_T4) == (1, 1, 1)


def test_pinned_memory_of_a_machine_without_classes_is_a_memory_of_its_own() -> None:
    assert speeds(EXPERTS_ON_HOST, FETCH, machine=at_peak(STAGED_T4)) == (1, 1)


@pytest.mark.parametrize(
    ("machine", "policy", "contends"),
    [
        (T4, "cgopipe", True),
        (T4, "layer_split", True),
        (T4, "layer_streaming", False),
        (at_peak(T4), "cgopipe", False),
    ],
)
def test_a_host_that_computes_contends_with_copies(machine: Machine, policy: str, contends: bool) -> None:
    layout = weight_layout(find_shape("mixtral-8x7b"))
    plan = plan_run(machine, layout, split_batch([64] * 4, 6, 4), make_policy(policy, {}))
    assert lanes_contend(plan) == contends


# -- prefill in chunks -----------------------------------------------------------------------------


def starts_of(policy: str, **settings: Any) -> set[int]:
    """Experts of a layer that start a call, in one request's decode steps on a T4 with two experts per token."""
    layout, seen, chosen = weight_layout(find_shape("mixtral-8x7b")), Ended(), make_policy(policy, settings)
    trial_run(plan_run(T4, layout, Batch((8,), 4, ((0,),)), chosen), chosen, observers=[seen])
    ran = [task for task in seen.tasks if task.verb == "run_expert" and task.step > 0]
    assert set(Counter((task.step, task.layer) for task in ran).values()) == {2}
    return set(Counter((task.step, task.layer) for task in ran if not task.work.joins).values())


def test_the_experts_of_a_layer_start_in_one_call_where_their_weights_stay() -> None:
    assert starts_of("layer_split", gpu_layers=0) == {1}


def test_fetched_experts_start_one_by_one() -> None:
    assert starts_of("lru_offload") == {2}


@pytest.mark.parametrize("name", ["cpu-nvme", "m2-ultra"])
def test_in_one_memory_an_expert_is_cached_from_its_second_task_after_a_fetch_on(name: str) -> None:
    layout, seen = weight_layout(find_shape("mixtral-0.8b")), Ended()
    policy = make_policy("lru_offload", {"offload_per_layer": 4})
    plan = plan_run(load_machine(name), layout, split_batch([8] * 4, 4, 2), policy)
    trial_run(plan, policy, observers=[seen])
    arrived, kinds = set[tuple[int, int]](), Counter[str]()
    for task in seen.tasks:
        if isinstance(task, PageTransfer) and task.step >= 0:
            arrived |= {(page.layer, page.expert) for page in task.pages}
        elif task.verb == "run_expert":
            expert = task.layer, task.expert
            assert task.work.kind == f"{'expert' if expert in arrived else 'cached expert'} at accelerator"
            arrived.discard(expert)
            kinds[task.work.kind] += 1
    assert len(kinds) == 2, kinds


def test_on_a_gpu_experts_that_were_fetched_have_one_cost() -> None:
    layout, seen, policy = weight_layout(find_shape("mixtral-8x7b")), Ended(), make_policy("lru_offload", {})
    trial_run(plan_run(T4, layout, Batch((8,), 4, ((0,),)), policy), policy, observers=[seen])
    assert {task.work.kind for task in seen.tasks if task.verb == "run_expert"} == {"expert at accelerator"}


def test_a_prefill_in_chunks_takes_the_time_of_its_chunks() -> None:
    """A prompt of 512 tokens in four chunks reads the weights, and starts three kernels, three times more."""
    machine, layout = load_machine("l4"), weight_layout(find_shape("mixtral-0.8b"))
    rates, seen = rates_of(machine.accelerator), []
    for chunk in (None, 128):
        policy, observer = make_policy("resident", {}), Ended()
        plan = plan_run(machine, layout, Batch((512,), 1, ((0,),), prefill_chunk=chunk), policy)
        trial_run(plan, policy, observers=[observer])
        seen.append([task for task in observer.tasks if task.verb == "pre_attention"])
    whole, cut = seen
    layers = layout.config.layers
    assert [task.work.parts[0].rows for task in whole] == [512] * layers
    assert [task.work.parts[0].rows for task in cut] == [128] * 4 * layers
    again = plan.operations.before_attention.nbytes / (300 * GB * rates["weights"].expected)
    again += 3 * rates["launch_seconds"].expected
    longer = sum(task.end - task.start for task in cut) - sum(task.end - task.start for task in whole)
    assert longer / 1e9 == pytest.approx(layers * 3 * again, rel=1e-3)

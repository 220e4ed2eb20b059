"""Page-locked hosts by default, and machines whose limit of page-locked memory has pages staged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from commands import SIMULATE, Said
from moesched import JobReport
from moesched.errors import BadInput
from moesched.inputs.lookup import find_shape
from moesched.machines import Contention, Machine, Staging, Tier, load_machine, machine_names, parse_machine
from moesched.machines.commented_toml import commented_toml
from moesched.machines.local import unified_machine
from moesched.machines.staging import staged
from moesched.machines.sustained import at_peak, link_kind, sustained_share
from moesched.machines.toml_text import machine_toml
from moesched.models.host_buffers import NUMBER_RING_BYTES, RING_SLOTS
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.steps.plan import Plan
from moesched.tasks import PageTransfer
from moesched.testing import Case, run_on_symbols
from runs import FORTY_PERCENT, predicted, virtual_run

T4, NVME = load_machine("t4"), load_machine("t4-nvme")
WITH_GPU = [name for name in machine_names() if load_machine(name).page_locked]


def ends(machine: Machine) -> set[tuple[str, str]]:
    return {(link.source, link.destination) for link in machine.links}


def bytes_per_second(machine: Machine, source: str, destination: str) -> float:
    link = machine.link(source, destination)
    return link.bandwidth * sustained_share(machine, link, {})


# -- the description ---------------------------------------------------------------------------------------------------


def test_machines_with_a_gpu_ship_page_locked() -> None:
    assert {"t4", "t4-nvme", "t4x4", "l4", "a100-80g", "h100", "h200", "rtx6000", "rtx6000-ada"} < set(
        WITH_GPU
    )
    for name in WITH_GPU:
        machine = load_machine(name)
        assert "pinned" not in machine.memories
        assert {link_kind(machine, link) for link in machine.links} <= {"pinned", "disk"}


def test_machines_with_one_memory_are_not_page_locked() -> None:
    assert not load_machine("cpu-nvme").page_locked
    assert not load_machine("m2-ultra").page_locked


@pytest.mark.parametrize("name", WITH_GPU)
def test_pinned_memory_has_the_links_that_the_host_s_had(name: str) -> None:
    machine = load_machine(name)
    limited = staged(machine, "8GB")
    assert not limited.page_locked
    assert limited.roles.pinned == "pinned"
    assert limited.memories["pinned"] == Tier(capacity="8GB", bandwidth=machine.memories["host"].bandwidth)
    assert ends(limited) - ends(machine) == {
        ("host", "pinned"),
        ("pinned", "gpu"),
        *({("disk", "pinned")} if "disk" in machine.memories else ()),
    }
    to_gpu = limited.link("pinned", "gpu")
    assert (to_gpu.lane, to_gpu.bandwidth) == ("host->gpu", machine.link("host", "gpu").bandwidth)
    assert all(
        limited.link("disk", end).lane == "disk" for end in ("host", "pinned") if "disk" in limited.memories
    )


@pytest.mark.parametrize("name", WITH_GPU)
@pytest.mark.parametrize("text", [machine_toml, lambda machine: commented_toml(machine, {})])
def test_both_machines_are_read_as_they_were_written(name: str, text: Callable[[Machine], str]) -> None:
    for machine in (load_machine(name), staged(load_machine(name), "8GB")):
        assert parse_machine(text(machine).encode(), "text") == machine


rates = st.floats(min_value=1e6, max_value=1e12)


@given(link=rates, copies=rates, rated=st.booleans())
def test_what_is_not_page_locked_is_copied_at_the_rate_of_the_slower_hop(
    link: float, copies: float, rated: bool
) -> None:
    whole = T4 if rated else at_peak(T4)
    links = [replace(each, bandwidth=link) for each in whole.links]
    machine = staged(replace(whole, links=links, staging=Staging(bandwidth=copies)), "8GB")
    hops = {(first, second): bytes_per_second(machine, first, second) for first, second in ends(machine)}
    slower = hops["pinned", "gpu"] if link <= copies else hops["host", "pinned"]
    assert hops["host", "gpu"] == hops["gpu", "host"] == pytest.approx(slower)


def test_without_a_ring_the_driver_s_pageable_copies_are_slower() -> None:
    ring, driver = (staged(T4, "8GB", ring=each) for each in (True, False))
    assert bytes_per_second(ring, "host", "gpu") == 12e9
    assert bytes_per_second(driver, "host", "gpu") == 6e9
    assert bytes_per_second(ring, "pinned", "gpu") == bytes_per_second(driver, "pinned", "gpu") == 12e9


def test_measured_contention_stays_with_the_copies_that_it_was_measured_for() -> None:
    pairs = [
        Contention(work="host->gpu", beside="gpu->host", rate=0.9),
        Contention(work="host->pinned", beside="gpu->host + host->gpu", rate=0.5),
    ]
    measured = replace(T4, contention=pairs)
    assert parse_machine(machine_toml(measured).encode(), "text") == measured
    limited = staged(measured, "8GB")
    assert [(pair.work, pair.beside) for pair in limited.contention] == [
        ("pinned->gpu", "gpu->host"),
        ("host->pinned", "gpu->host + pinned->gpu"),
    ]
    assert parse_machine(machine_toml(limited).encode(), "text") == limited


@pytest.mark.parametrize(
    ("machine", "limit", "told"),
    [
        (T4, "188GB", r"pinned=188 GB limits page-locked memory of 188 GB: give less"),
        (replace(T4, staging=None), "8GB", r"t4 does not say how fast its host copies .*: add \[staging\]"),
        (staged(T4, "8GB"), "4GB", "t4 has pinned memory already"),
        (load_machine("m2-ultra"), "4GB", "m2-ultra has one memory for all"),
    ],
)  # fmt: skip
def test_a_limit_that_makes_no_sense_is_refused(machine: Machine, limit: int | str, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        staged(machine, limit)


# -- policies ----------------------------------------------------------------------------------------------------------


def test_cgopipe_stages_its_pages_only_where_page_locked_memory_is_limited() -> None:
    lanes = {
        machine.name: {
            lane.name
            for lane in virtual_run("cgopipe", machine=machine, budgets=FORTY_PERCENT).recording.lanes
        }
        for machine in (T4, replace(staged(T4, "8GB"), name="staged"))
    }
    assert lanes["staged"] - lanes["t4"] == {"host->pinned"}


@pytest.mark.parametrize("policy", ["cgopipe", "three_tiers"])
@pytest.mark.parametrize("slots", [1, 2])
def test_pages_pass_through_fewer_pinned_slots_than_a_layer_has_pages(policy: str, slots: int) -> None:
    chosen: Any = make_policy(policy)
    case = Case(name="few slots", machine=NVME, layers=4, weights=0.7)
    largest = max(page.nbytes for page in case.layout().pages)
    beside = NUMBER_RING_BYTES + RING_SLOTS * largest + 8192  # the last: activations
    plan = replace(case, machine=staged(NVME, slots * largest + beside)).plan(chosen)
    ended = run_on_symbols(chosen, plan)
    assert len(chosen.staging.slots) == slots < max(map(len, chosen.streamed))
    assert ended.tokens == ended.expected


@pytest.mark.parametrize("machine", [NVME, staged(NVME, "8GB")], ids=["page-locked", "staged"])
def test_three_tiers_read_the_disk_only_for_what_the_host_does_not_hold(machine: Machine) -> None:
    policy: Any = make_policy("three_tiers")
    case = Case(name="tiers", machine=machine, layers=4, weights=0.7)
    layout = case.layout()
    largest = max(page.nbytes for page in layout.pages)
    room = 16 * largest + machine.page_locked * (NUMBER_RING_BYTES + RING_SLOTS * largest)
    tight = replace(machine, memories=machine.memories | {"host": Tier(capacity=room, bandwidth=40e9)})
    plan = replace(case, machine=tight).plan(policy)
    ended = run_on_symbols(policy, plan)
    held = set(policy.held.pages())
    streamed = {page for layer in policy.streamed for page in layer}
    moves = [task for task in ended.tasks if isinstance(task, PageTransfer) and task.step >= 0]
    read = {page for task in moves if task.lane.name == "disk" for page in task.pages}
    assert held
    assert read == streamed - held
    copied = {page for task in moves if task.verb == "copy_to_pinned" for page in task.pages}
    assert copied == (read if machine.page_locked else streamed)


@pytest.mark.parametrize("lacking", [1, 2])
def test_three_tiers_read_few_pages_from_the_disk_once(lacking: int) -> None:
    """The pages that the host does not hold all have a slot in the buffer that they pass through."""
    policy: Any = make_policy("three_tiers")
    case = Case(name="few from the disk", machine=NVME, layers=6, new_tokens=4, weights=0.7)
    roomy = case.plan(policy)
    beside = roomy.memory("host").peak - sum(map(roomy.slot_bytes, policy.held.pages()))
    largest = max(page.nbytes for page in case.layout().pages)
    room = beside + (len(policy.held.slots) - lacking) * largest
    tight = replace(NVME, memories=NVME.memories | {"host": Tier(capacity=room, bandwidth=40e9)})
    ended = run_on_symbols(policy, replace(case, machine=tight).plan(policy))
    moves = [task for task in ended.tasks if isinstance(task, PageTransfer) and task.step >= 0]
    assert ended.tokens == ended.expected
    assert sum(len(task.pages) for task in moves if task.lane.name == "disk") == lacking


def test_a_policy_that_asks_for_pinned_memory_is_told_why_there_is_none() -> None:
    layout, batch = weight_layout(find_shape("mixtral-0.8b")), split_batch([4], 2, 1)
    unified = unified_machine(
        "one", memory=10**10, disk=10**11, flops={"bfloat16": 1e12}, memory_bandwidth=1e10, disk_bandwidth=1e9
    )
    for machine, reason in (
        (T4, "all of the host's is page-locked"),
        (unified, "accelerator and host share one"),
    ):
        with pytest.raises(BadInput, match=f"has no pinned memory, as {reason}: fetch pages directly"):
            Plan(machine, layout, batch).memory("pinned")


# -- budgets -----------------------------------------------------------------------------------------------------------


def report(machine: str | Machine, pinned: str | None = None) -> JobReport:
    budgets = {"gpu": "1GB"} | ({"pinned": pinned} if pinned else {})
    return predicted("cgopipe", machine=machine, workload="uniform", gen=2, batch_size=4, budgets=budgets)


def test_a_budget_of_pinned_memory_says_that_locking_is_limited() -> None:
    assert "host->pinned" not in report("t4").lanes
    limited = report("t4", "500MB")
    assert "host->pinned" in limited.lanes
    assert limited.budget_bytes["pinned"] == 500_000_000 >= limited.peak_bytes["pinned"] > 0


def test_a_budget_of_pinned_memory_is_for_all_accelerators_together() -> None:
    assert report("t4x2", "2GB").budget_bytes["pinned"] == 2 * 10**9


def test_a_machine_that_always_stages_takes_the_budget_as_that_of_its_memory() -> None:
    given, described = report(T4, "500MB"), report(staged(T4, "8GB"), "500MB")
    assert given.step_seconds == described.step_seconds


def test_changes_of_a_machine_apply_to_the_copies_of_a_limit(command: Callable[..., Said]) -> None:
    budgets = ("--policy", "cgopipe", "--gen", "2", "--batch-size", "4", "--budget", "gpu=1GB", "--json")
    slow, fast = (
        command(
            *SIMULATE, *budgets, "--budget", "pinned=500MB", "--machine-set", f"link.host->pinned={rate}"
        ).json
        for rate in ("1GB/s", "100GB/s")
    )
    assert slow["decode_tokens_per_second"] < fast["decode_tokens_per_second"]

"""Plans: what is declared in any order, what is free meanwhile, what contradicts itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.errors import OverBudget, PolicyError
from moesched.machines import load_machine
from moesched.machines.local import unified_machine
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.requests.batch import split_batch
from moesched.steps.plan import Plan
from moesched.steps.reservations import Reservation

T4 = load_machine("t4")
LAYOUT = weight_layout(SHAPES["mixtral-0.8b"])
BATCH = split_batch([200, 120, 80, 40, 30, 20], 12, 2)
DENSE = [page for i in range(LAYOUT.config.layers) for page in LAYOUT.dense(i)]
EXPERTS = [page for page in LAYOUT.pages if page.expert >= 0]

DECLARATIONS: list[Callable[[Plan], object]] = [
    lambda plan: plan.limit_in_flight(2),
    lambda plan: plan.place_kv("accelerator", [1]),
    lambda plan: plan.place_kv("host", [0, 2]),
    lambda plan: plan.reserve_kv_buffers(2),
    lambda plan: plan.run_experts_on_host(),
    lambda plan: plan.run_experts_on_host(resident=True),
    lambda plan: plan.keep(DENSE),
    lambda plan: plan.pool("accelerator", "visitors", 4, EXPERTS),
]


def made(budget: int | None = None) -> Plan:
    return Plan(T4, LAYOUT, BATCH, {} if budget is None else {"gpu": budget})


def declared(order: list[Callable[[Plan], object]]) -> Plan:
    plan = made()
    for declare in order:
        declare(plan)
    return plan


@given(st.permutations(DECLARATIONS))
def test_the_order_of_declarations_changes_nothing(order: list[Callable[[Plan], object]]) -> None:
    one, other = declared(order), declared(DECLARATIONS)
    for plan in (one, other):
        plan.check()
    assert one.declared == other.declared
    for name, memory in one.memories.items():
        assert (memory.used, memory.peak) == (other.memories[name].used, other.memories[name].peak)


@given(st.permutations(DECLARATIONS), st.integers(0, len(DECLARATIONS)))
def test_free_is_what_everything_declared_so_far_leaves(
    order: list[Callable[[Plan], object]], count: int
) -> None:
    plan = declared(order[:count])
    free = {"gpu": plan.free("accelerator"), "host": plan.free("host")}
    taken = list(plan.reservations.of(plan.declared))
    taken += [
        Reservation(each.memory.name, each.name, each.nbytes)
        for each in (*plan.weights.resident, *plan.weights.pools)
    ]
    for name, left in free.items():
        assert left == plan.memories[name].capacity - sum(
            each.nbytes for each in taken if each.memory == name
        )


def test_free_is_the_same_before_and_after_the_memory_is_reserved() -> None:
    plan = declared(DECLARATIONS)
    before = plan.free("accelerator"), plan.free("host")
    assert plan.memory("accelerator").used == 0
    plan.check()
    assert (plan.free("accelerator"), plan.free("host")) == before


def test_a_plan_says_what_other_declarations_would_leave_and_stays_as_it_is() -> None:
    plan = made()
    few = plan.free("accelerator", given=replace(plan.declared, in_flight=1))
    assert few > plan.free("accelerator")
    plan.limit_in_flight(1)
    assert plan.free("accelerator") == few


def test_more_than_a_budget_is_refused_as_soon_as_somebody_asks_what_is_left() -> None:
    plan = made(budget=450_000_000)
    plan.place_kv("accelerator")
    plan.keep(EXPERTS)
    with pytest.raises(
        OverBudget, match=r"page L\d+ E\d #0, number \d+ of \d+ kept in gpu, needs .* bytes too few"
    ):
        plan.free("accelerator")
    with pytest.raises(
        OverBudget, match=r"page L\d+ E\d #0, number \d+ of \d+ kept in gpu, needs .* bytes too few"
    ):
        plan.check()


CONTRADICTIONS: list[tuple[Callable[[Plan], object], Callable[[Plan], object], str]] = [
    (
        lambda plan: plan.limit_in_flight(1),
        lambda plan: plan.limit_in_flight(2),
        "limit_in_flight: the limit is 1 already: declare one limit, not 2",
    ),
    (
        lambda plan: plan.reserve_kv_buffers(2),
        lambda plan: plan.reserve_kv_buffers(3),
        "reserve_kv_buffers: 2 are declared already: declare one number, not 3",
    ),
    (
        lambda plan: plan.keep(DENSE),
        lambda plan: plan.keep(DENSE[-1:]),
        r"keep: page L\d+ dense #0 stays in gpu already: keep each once",
    ),
    (
        lambda plan: plan.limit_in_flight(1),
        lambda plan: plan.keep([*DENSE, DENSE[3]]),
        "keep: page L3 dense #0 stays in gpu already: keep each once",
    ),
    (
        lambda plan: plan.limit_in_flight(1),
        lambda plan: plan.pool("accelerator", "small", 2, DENSE, filled=EXPERTS[:1]),
        r"pool: page L0 E0 #0 has [\d,]+ bytes, and the largest page that the pool was declared for has [\d,]+",
    ),
    (
        lambda plan: (plan.pool("host", "small", 2, DENSE), plan.pool("accelerator", "small", 2, DENSE)),
        lambda plan: plan.pool("accelerator", "small", 1, EXPERTS),
        "pool: gpu has a pool small already: give each its own name",
    ),
    (
        lambda plan: plan.place_experts([range(8)]),
        lambda plan: plan.place_experts([range(8)]),
        "place_experts: experts were placed already: place them once",
    ),
]


@pytest.mark.parametrize(
    ("first", "second", "says"), CONTRADICTIONS, ids=[says[:12] for *_, says in CONTRADICTIONS]
)
def test_contradictions_are_refused_at_the_policys_own_line(
    first: Callable[[Plan], object], second: Callable[[Plan], object], says: str
) -> None:
    plan = made()
    first(plan)
    with pytest.raises(PolicyError, match=says):
        second(plan)


def test_numbers_that_are_not_whole_are_refused_at_the_policys_own_line() -> None:
    plan = made()
    free = plan.free("accelerator")
    with pytest.raises(PolicyError, match=r"limit_in_flight: 1.5 is no whole number: give one"):
        plan.limit_in_flight(1.5)  # type: ignore[arg-type]  # a policy without types
    with pytest.raises(PolicyError, match=r"reserve_kv_buffers: -1 is no whole number, 0 or more"):
        plan.reserve_kv_buffers(-1)
    assert plan.free("accelerator") == free


@pytest.mark.parametrize("declare", DECLARATIONS[1:])
def test_nothing_can_be_declared_once_the_memory_is_reserved(declare: Callable[[Plan], object]) -> None:
    plan = made()
    plan.place_kv("host")
    plan.check()
    plan.check()
    with pytest.raises(PolicyError, match=r"its memory reserved: declare it in Policy.plan|place each once"):
        declare(plan)


def test_a_micro_batch_without_a_place_for_its_cache_is_named() -> None:
    plan = made()
    plan.place_kv("host", [0, 1])
    with pytest.raises(
        PolicyError, match=r"the plan has no place for the KV cache of mb2: call plan\.place_kv"
    ):
        plan.check()


def test_where_one_memory_is_all_the_host_needs_no_rows_of_its_own() -> None:
    machine = unified_machine(
        "one memory",
        memory=10**10,
        disk=10**11,
        flops={"bfloat16": 1e12},
        memory_bandwidth=1e11,
        disk_bandwidth=1e9,
    )
    plan = Plan(machine, LAYOUT, BATCH)
    before = plan.free("host")
    plan.run_experts_on_host(resident=True)
    assert plan.free("host") == before
    assert not plan.declared.resident_experts_on_host

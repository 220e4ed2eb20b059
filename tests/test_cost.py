"""Cost models: what work takes on a described machine, and on a measured one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.drivers.sharing import fair_rates
from moesched.errors import BadInput
from moesched.machines import Contention, CostPoint, Link, Machine, Processor, Roles, Tier
from moesched.machines.calibrated import Calibrated
from moesched.machines.cost import cost_model
from moesched.machines.roofline import Roofline
from moesched.machines.surfaces import Curve, Surface
from moesched.models.operations import Operations
from moesched.models.shapes import SHAPES
from moesched.models.tensor_sizes import ResidentShare
from moesched.seams import Demand
from moesched.work import Work, WorkPart

GB = 1e9
TABLE = [
    CostPoint(operation="route", size=100, rows=1, seconds=1.0, dtype="bfloat16"),
    CostPoint(operation="route", size=100, rows=3, seconds=2.0, dtype="bfloat16"),
    CostPoint(operation="route", size=300, rows=1, seconds=3.0, dtype="bfloat16"),
    CostPoint(operation="route", size=300, rows=3, seconds=6.0, dtype="bfloat16"),
    CostPoint(operation="attention", size=0, seconds=0.5, dtype="bfloat16"),
    CostPoint(operation="disk->host", size=10, seconds=0.25),
    CostPoint(operation="route", size=100, seconds=99.0, dtype="float32"),
]


def machine(**changes: Any) -> Machine:
    """One processor of 1 TFLOP/s on a memory of 100 GB/s, with a disk of 2 GB/s."""
    described = Machine(
        name="desk",
        processors={"cpu": Processor(memory="host", flops={"bfloat16": 1e12}, launch_seconds=0.001)},
        memories={
            "host": Tier(capacity="1 GB", bandwidth=100 * GB),
            "disk": Tier(capacity="9 GB", bandwidth=2 * GB),
        },
        links=[Link(source="disk", destination="host", bandwidth=2 * GB, latency=0.01)],
        roles=Roles(accelerator="cpu", host="cpu", weights="disk"),
    )
    return msgspec.structs.replace(described, **changes)


def measured(**changes: Any) -> Calibrated:
    return Calibrated(machine(cost_table=TABLE, **changes), "bfloat16")


# -- the roofline


def test_the_roofline_takes_the_longer_of_computing_and_moving() -> None:
    roofline = Roofline(machine(), "bfloat16")
    assert roofline.work(Work("kernel", "cpu", flops=2e12, nbytes=100 * GB)).seconds == pytest.approx(2.001)
    assert roofline.work(Work("kernel", "cpu", flops=1e12, nbytes=300 * GB)).seconds == pytest.approx(3.001)
    shares = roofline.work(Work("kernel", "cpu", flops=1e12, nbytes=50 * GB)).shares
    assert dict(shares) == {"cpu": 0.999, "host": 0.5}, "of each resource, meanwhile"


def test_a_copy_takes_its_link_and_a_part_of_both_memories() -> None:
    demand = Roofline(machine(), "bfloat16").work(Work("copy", "disk->host", nbytes=2 * GB))
    assert demand.seconds == pytest.approx(1.01)
    assert dict(demand.shares) == {"disk->host": 0.99, "disk": 0.99, "host": 0.02}


def test_the_roofline_refuses_what_the_machine_does_not_describe() -> None:
    with pytest.raises(BadInput, match="no cost for kernel on 'npu': describe that resource"):
        Roofline(machine(), "bfloat16").work(Work("kernel", "npu", flops=1))
    with pytest.raises(BadInput, match="no rate for float32: add it"):
        Roofline(machine(), "float32").work(Work("kernel", "cpu", flops=1))


# -- measured costs


def test_a_calibrated_machine_is_priced_by_its_table_and_any_other_by_its_roofline() -> None:
    assert isinstance(cost_model(machine(cost_table=TABLE), "bfloat16"), Calibrated)
    assert isinstance(cost_model(machine(), "bfloat16"), Roofline)


def test_a_work_takes_the_sum_of_its_parts() -> None:
    parts = (WorkPart("route", 100, rows=3, times=2), WorkPart("attention", 0))
    assert measured().work(Work("kernel", "cpu", parts=parts)).seconds == pytest.approx(2 * 2.0 + 0.5)


def test_costs_between_the_measured_ones_are_interpolated_over_rows_and_over_sizes() -> None:
    costs = measured()
    assert costs.seconds(WorkPart("route", 100, rows=2)) == pytest.approx(1.5)
    assert costs.seconds(WorkPart("route", 200, rows=1)) == pytest.approx(2.0)
    assert costs.seconds(WorkPart("route", 200, rows=2)) == pytest.approx(3.0)


def test_every_work_pays_for_being_dispatched_where_that_was_measured() -> None:
    dispatch = CostPoint(operation="dispatch", size=0, seconds=0.125)
    costs = Calibrated(machine(cost_table=[*TABLE, dispatch]), "bfloat16")
    assert costs.work(Work("kernel", "cpu", parts=(WorkPart("attention", 0),))).seconds == pytest.approx(
        0.625
    )


def test_the_router_has_a_price_of_its_own_within_post_attention_where_it_was_measured() -> None:
    part = WorkPart("route", 100)
    alone, within = (Work(kind, "cpu", parts=(part,)) for kind in ("route", "post_attention"))
    product = CostPoint(
        operation="route within post_attention", size=100, rows=1, seconds=0.25, dtype="bfloat16"
    )
    costs = Calibrated(machine(cost_table=[*TABLE, product]), "bfloat16")
    assert (costs.work(alone).seconds, costs.work(within).seconds) == (1.0, 0.25)
    assert measured().work(within).seconds == 1.0


def test_an_operation_that_was_not_measured_is_refused() -> None:
    with pytest.raises(BadInput, match="no cost for 'resident route' in bfloat16: run `moesched calibrate`"):
        measured().work(Work("kernel", "cpu", parts=(WorkPart("resident route", 100),)))
    with pytest.raises(BadInput, match="was not measured in float16"):
        Calibrated(machine(cost_table=TABLE), "float16")


def test_work_without_parts_is_left_to_the_roofline() -> None:
    work = Work("kernel", "cpu", flops=1e12)
    assert measured().work(work) == Roofline(machine(), "bfloat16").work(work)


def test_what_runs_at_once_is_slowed_as_it_was_measured_alone_and_together() -> None:
    few = "few rows"
    alone = [
        Contention(work=few, beside="disk->host", rate=0.75),
        Contention(work=few, beside="attention", rate=0.5),
        Contention(work="disk->host", beside=few, rate=0.875),
    ]
    works = (
        Work("kernel", "cpu", parts=(WorkPart("route", 100),)),
        Work("attention", "cpu", parts=(WorkPart("attention", 0),)),
        Work("disk->host", "disk->host", parts=(WorkPart("disk->host", 10),)),
    )
    kernel, attention, read = map(measured(contention=alone).work, works)
    assert fair_rates([kernel]) == (1.0,)
    assert fair_rates([kernel, read]) == (0.75, 0.875)
    assert fair_rates([kernel, attention, read]) == (0.375, 1.0, 0.875)
    together = [*alone[:2], Contention(work=few, beside="attention + disk->host", rate=0.25)]
    kernel, attention, read = map(measured(contention=together).work, works)
    assert fair_rates([read, kernel, attention]) == (1.0, 0.25, 1.0)
    assert fair_rates([kernel, attention, attention, read])[0] == 0.5 * 0.5 * 0.75
    one = Demand(1.0, (("link", 1.0),), "copy", (("copy", 0.5),))
    assert fair_rates([one, one]) == (0.25, 0.25), "on top of what resources hold"


# -- curves


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(10, 2.0), (20, 3.0), (40, 9.0)], {10: 2, 15: 2.5, 20: 3, 30: 6, 40: 9, 70: 16, 5: 1.5, -90: 1}),
        ([(1, 3.0), (2, 2.0), (3, 1.0), (4, 4.0)], {1: 2, 2: 2, 3: 2, 4: 4}),
        ([(1, 1.0), (2, 9.0), (3, 2.0), (4, 2.0), (5, 3.0)], {1: 1, 2: 2, 3: 2, 4: 2, 5: 3}),
        ([(1, 1.0), (1, 9.0), (1, 2.0)], {1: 2}),
    ],
    ids=[
        "it is straight between points and goes on beyond them",
        "it is level where it was measured to fall",
        "one point that was measured far too slow does not draw its neighbours up",
        "of many times at one place it takes the median",
    ],
)
def test_a_curve(points: list[tuple[float, float]], expected: dict[float, float]) -> None:
    curve = Curve(points)
    assert {x: curve(x) for x in expected} == pytest.approx(expected)


@given(
    st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-6, 10.0)), min_size=1, max_size=9),
    st.floats(0, 1e10),
    st.floats(0, 1e10),
)
def test_more_never_takes_less(points: list[tuple[float, float]], one: float, other: float) -> None:
    curve = Curve(points)
    assert 0 < curve(min(one, other)) <= curve(max(one, other)) * (1 + 1e-9)


def test_more_rows_take_no_less_time_but_larger_weights_may() -> None:
    measured = {(10, 1): 2.0, (10, 4): 1.0, (20, 1): 8.0, (30, 1): 4.0}
    surface = Surface(
        CostPoint(operation="x", size=size, rows=rows, seconds=seconds)
        for (size, rows), seconds in measured.items()
    )
    assert surface(10, 1) == surface(10, 4) == 1.5
    assert [surface(size, 1) for size in (20, 25, 30)] == [8.0, 6.0, 4.0]
    one = Surface([CostPoint(operation="x", size=5, seconds=0.5)])
    assert one(5, 1) == one(50, 7) == 0.5


# -- the parts of works


def parts(amount: Any) -> dict[str, WorkPart]:
    return {part.operation: part for part in amount.parts}


def test_an_operation_is_in_two_parts_where_only_some_of_its_weights_stay() -> None:
    config = SHAPES["mixtral-0.8b"]
    operations = Operations(config, "bfloat16", ResidentShare(dense=1.0, experts=0.25))
    found = parts(operations.post_attention(16))
    warmed = config.routed.experts * (1 - (1 - config.routed.top_k / config.routed.experts) ** 16)
    assert set(found) == {"resident route", "resident experts", "experts", "combine"}
    assert found["resident experts"].times == pytest.approx(warmed / 4)
    assert found["experts"].times == pytest.approx(warmed * 3 / 4)
    assert found["experts"].rows == pytest.approx(16 * config.routed.top_k / warmed)
    assert found["experts"].size == operations.expert_bytes


def test_attention_is_one_call_for_neighbours_of_one_length_and_one_for_each_prompt() -> None:
    operations = Operations(SHAPES["mixtral-0.8b"], "bfloat16")
    steps = parts(operations.attention([(1, 8), (1, 8), (1, 9)]))
    assert steps["attention call"].times == 2
    heads = operations.config.attention.kv_heads
    assert steps["step attention"] == WorkPart(
        "step attention", 25 * operations.kv_bytes / heads / 3, heads, 3
    )
    assert operations.attention_step([8, 8, 9]) == operations.attention([(1, 8), (1, 8), (1, 9)])
    prompt = parts(operations.attention([(8, 8), (8, 8)]))["attention prompt"]
    assert (prompt.times, prompt.size) == (2, 4 * 36 * operations.query_width)


def test_the_roofline_reads_experts_no_faster_than_they_were_seen_to_be_read() -> None:
    slow = Processor(memory="host", flops={"bfloat16": 1e12}, expert_bandwidth=10 * GB)
    roofline = Roofline(machine(processors={"cpu": slow}), "bfloat16")
    operations = Operations(SHAPES["mixtral-0.8b"], "bfloat16")

    def seconds(amount: Any) -> float:
        return roofline.work(Work("expert", "cpu", amount.flops, amount.nbytes, 1, amount.parts)).seconds

    reading = operations.expert_bytes / (10 * GB)
    assert (
        seconds(operations.resident_expert(1))
        == seconds(operations.fetched_expert(1))
        == pytest.approx(reading)
    )
    assert seconds(operations.post_attention(1)) == pytest.approx(2 * reading)
    assert seconds(operations.fetched_expert(4000)) > 2 * reading, "many rows take longer to compute"
    assert seconds(operations.sample(1)) == pytest.approx(operations.sample(1).nbytes / (100 * GB))


def test_experts_that_are_read_slowly_leave_their_memory_to_others() -> None:
    slow = Processor(memory="host", flops={"bfloat16": 1e12}, expert_bandwidth=10 * GB)
    reading = Work("expert", "cpu", nbytes=10 * GB, parts=(WorkPart("expert", 10 * GB),))
    demand = Roofline(machine(processors={"cpu": slow}), "bfloat16").work(reading)
    assert demand.seconds == 1
    assert dict(demand.shares) == {"host": 0.1}, "10 of 100 GB/s"


# -- amounts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 7])
@given(totals=st.lists(st.integers(1, 20), min_size=1))
def test_a_decode_step_asks_for_what_its_sequences_ask_for_one_by_one(
    window: int | None, totals: list[int]
) -> None:
    config = SHAPES["mixtral-0.8b"].varied(window=window)
    operations = Operations(config, "bfloat16")
    assert operations.attention_step(totals) == operations.attention([(1, total) for total in totals])

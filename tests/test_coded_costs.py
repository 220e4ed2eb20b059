"""Costs of coded weights: from the formats of a model's tensors to the measured products in these formats."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from moesched.machines import CostPoint, Machine, load_machine
from moesched.machines.calibrated import COMBINE_WITHIN, ROUTE_WITHIN, Calibrated
from moesched.machines.gpu_cost import GpuCosts
from moesched.machines.product_times import RESIDENT
from moesched.models.coded_models import coded_as
from moesched.models.operations import Operations
from moesched.models.shapes import SHAPES
from moesched.models.stored_formats import CODED, STORED_FORMATS, nearest_by_bits
from moesched.models.tensor_sizes import COLUMNS
from moesched.work import Work, WorkPart

MODEL = SHAPES["mixtral-0.8b"]
WEIGHTS = 25_600
PLAIN = 2 * WEIGHTS
SLOWER = {"": 1.0, "q8_0": 0.75, "q4_k": 0.5, "q6_k": 2.0}
"""Time of a product by weights in each format, over that by plain ones."""


def product(stored: str, slower: float) -> CostPoint:
    """A product with as many weights in any format."""
    nbytes = WEIGHTS * STORED_FORMATS[stored or "bfloat16"].bytes_per_weight
    return CostPoint(operation="product", size=nbytes, seconds=slower, dtype="bfloat16", format=stored)


ROUTES = [
    CostPoint(operation="resident route", size=PLAIN * times, seconds=3.0 * times, dtype="bfloat16")
    for times in (1, 2)
]
PRODUCTS = [product(stored, slower) for stored, slower in SLOWER.items()]
COLUMN_PRODUCT = replace(PRODUCTS[0], format=COLUMNS, seconds=4.5)


def measured(*table: CostPoint) -> Machine:
    return replace(load_machine("cpu-nvme"), cost_table=list(table))


def part(*formats: str, plain: int = 0) -> WorkPart:
    """A route with equal shares of weights in coded formats, of `WEIGHTS` in all, and bytes of plain ones."""
    coded = tuple(
        (stored, round(WEIGHTS / len(formats) * STORED_FORMATS[stored].bytes_per_weight))
        for stored in formats
    )
    return WorkPart("resident route", plain + sum(nbytes for _, nbytes in coded), coded=coded)


@pytest.mark.parametrize(
    ("weights", "seconds"),
    [
        (part("q8_0"), 3 * 0.75),
        (part("q4_k"), 3 * 0.5),
        (part("q4_k", "q6_k"), 3 * (0.5 + 2.0) / 2),
        (part("q8_0", plain=PLAIN), 6 * (0.75 + 1.0) / 2),
        (part("q5_k"), 3 * 0.5),
    ],
    ids=["one format", "another", "two by halves", "plain ones beside", "not measured: the nearest"],
)
def test_coded_weights_take_the_time_of_plain_ones_times_the_ratio_of_their_products(
    weights: WorkPart, seconds: float
) -> None:
    costs = Calibrated(measured(*ROUTES, *PRODUCTS), "bfloat16")
    assert costs.seconds(weights) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("operation", "seconds"),
    [("resident route", 1 + (9 - 1) * 0.25), ("resident experts", 9 * 0.25)],
    ids=["a call of its own", "experts of a layer in one call"],
)
def test_the_call_of_a_product_takes_as_long_by_coded_weights(operation: str, seconds: float) -> None:
    """A product takes a second and, by as many weights as `WEIGHTS`, 4 s more by plain and 1 s more by coded ones."""
    products = [
        replace(product(stored, 1 + each * times), size=product(stored, 1).size * times)
        for stored, each in (("", 4.0), ("q4_k", 1.0))
        for times in (1, 2)
    ]
    table = [replace(each, operation=operation, seconds=9.0) for each in ROUTES[:1]]
    costs = Calibrated(measured(*table, *products), "bfloat16")
    assert costs.seconds(part("q4_k")._replace(operation=operation)) == pytest.approx(seconds)


def test_a_cached_expert_that_was_not_measured_takes_as_long_as_one_that_just_arrived() -> None:
    names = {"expert": 4.0, "cached expert": 3.0}
    table = [replace(ROUTES[0], operation=name, seconds=seconds) for name, seconds in names.items()]
    work = Work("cached expert at accelerator", "cpu", parts=(WorkPart("cached expert", PLAIN),))
    for points, seconds in ((table, 3.0), (table[:1], 4.0)):
        assert Calibrated(measured(*points), "bfloat16").work(work).seconds == seconds


def test_a_machine_measured_without_coded_weights_takes_the_time_of_as_many_plain_bytes() -> None:
    costs = Calibrated(measured(*ROUTES, PRODUCTS[0]), "bfloat16")
    coded = part("q8_0", plain=PLAIN)
    assert costs.seconds(coded) == costs.seconds(WorkPart("resident route", coded.size))


@pytest.mark.parametrize(
    ("more", "seconds"),
    [((COLUMN_PRODUCT,), 4.5 + 2.0), ((replace(COLUMN_PRODUCT, seconds=0.5),), 0.5 + 2.0), ((), 3.0)],
    ids=["slower than by plain ones", "faster", "not measured"],
)
def test_matrices_that_lie_transposed_take_their_own_products_and_what_a_run_adds_to_plain_ones(
    more: tuple[CostPoint, ...], seconds: float
) -> None:
    """A plain route takes 3 s in a run, and its product 1 s alone."""
    costs = Calibrated(measured(*ROUTES, *PRODUCTS, *more), "bfloat16")
    assert costs.seconds(WorkPart("resident route", PLAIN, coded=((COLUMNS, PLAIN),))) == seconds


def test_a_layer_in_one_task_costs_one_call_whether_experts_lie_transposed_or_not() -> None:
    names = {"route": 3.0, ROUTE_WITHIN: 2.0, "expert": 4.0, "experts": 3.0}
    table = [
        replace(ROUTES[0], operation=f"{RESIDENT}{name}", seconds=seconds) for name, seconds in names.items()
    ]
    sums = [
        CostPoint(operation=name, size=8, seconds=seconds, dtype="bfloat16")
        for name, seconds in (("combine", 6.0), (COMBINE_WITHIN, 0.5))
    ]
    costs = Calibrated(measured(*table, *sums, *PRODUCTS, replace(COLUMN_PRODUCT, seconds=1.0)), "bfloat16")

    def seconds(*coded: tuple[str, int]) -> float:
        experts = WorkPart(f"{RESIDENT}experts", PLAIN, times=5, coded=coded)
        parts = WorkPart(f"{RESIDENT}route", PLAIN), experts, WorkPart("combine", 8)
        layer = Work("post_attention", "cpu", parts=parts)
        return costs.work(layer).seconds

    assert seconds() == 2.0 + 5 * 3.0 + 0.5
    assert seconds((COLUMNS, PLAIN)) == 2.0 + 5 * 3.0 + 0.5
    assert costs.work(Work("combine", "cpu", parts=(WorkPart("combine", 8),))).seconds == 6.0


def test_plain_experts_of_gpt_oss_lie_transposed_and_published_ones_do_not() -> None:
    published = SHAPES["gpt-oss-20b"]
    plain = Operations(replace(published, format=None, expert_format=None), "bfloat16").expert_product
    assert plain.coded == ((COLUMNS, plain.nbytes),)
    assert Operations(published, "bfloat16").expert_product.coded == ()


def test_weights_beyond_the_measured_sizes_take_what_a_product_with_them_takes_more() -> None:
    """A route is measured up to 2 x PLAIN, in 6 s; each PLAIN more of a product takes a third of a second."""
    larger = replace(PRODUCTS[0], size=4 * PLAIN, seconds=2.0)
    costs = Calibrated(measured(*ROUTES, PRODUCTS[0], larger), "bfloat16")
    assert costs.seconds(WorkPart("resident route", 8 * PLAIN)) == pytest.approx(6.0 + 6 / 3)
    assert costs.seconds(WorkPart("resident route", 2 * PLAIN)) == 6.0


def test_weights_beyond_the_measured_sizes_are_read_as_slowly_as_the_lm_head_of_a_run() -> None:
    """The head takes half as long again in a run as alone for one row, and a tenth longer for 16.

    Each PLAIN more of a product takes a third of a second, whatever its rows.
    """
    larger = replace(PRODUCTS[0], size=4 * PLAIN, seconds=2.0)
    many = [replace(each, rows=16, seconds=each.seconds + 8) for each in (PRODUCTS[0], larger)]
    heads = [
        replace(alone, operation="resident sample", seconds=alone.seconds * slower)
        for alone, slower in ((larger, 1.5), (many[1], 1.1))
    ]
    costs = Calibrated(measured(*ROUTES, PRODUCTS[0], larger, *many, *heads), "bfloat16")
    for rows, slower in ((1, 1.5), (16, 1.1)):
        part = WorkPart("resident route", 8 * PLAIN, rows=rows)
        assert costs.seconds(part) == pytest.approx(6.0 + 6 / 3 * slower), rows


def test_products_on_a_gpu_and_on_its_host_are_told_apart() -> None:
    machine = replace(
        load_machine("t4-nvme"),
        cost_table=[
            replace(each, resource=processor, seconds=each.seconds * times)
            for processor, faster in (("gpu", 0.1), ("cpu", 1.0))
            for each, times in zip(PRODUCTS, (faster, 1.0, 1.0, 1.0), strict=True)
        ],
    )
    costs = GpuCosts(machine, "bfloat16")
    for processor, plain in (("gpu", 0.1), ("cpu", 1.0)):
        assert costs.running(Work("route", processor, parts=(WorkPart("route", PLAIN),))) == pytest.approx(
            plain
        )
        assert costs.running(Work("route", processor, parts=(part("q6_k"),))) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("stored", "nearest"),
    [("q8_0", "q8_0"), ("q4_0", "q4_k"), ("q5_0", "q4_k"), ("q5_1", "q6_k"), ("q5_k", "q4_k")],
)
def test_a_format_that_was_not_measured_takes_the_nearest_by_bits(stored: str, nearest: str) -> None:
    assert nearest_by_bits(stored, ("q8_0", "q4_k", "q6_k", "mxfp4")) == nearest


@pytest.mark.parametrize("stored", CODED)
def test_all_work_on_weights_says_how_many_bytes_of_them_are_coded(stored: str) -> None:
    operations = Operations(coded_as(MODEL, stored), "bfloat16")
    for amount in (operations.pre_attention(4), operations.post_attention(4), operations.sample(4)):
        weighing = [each for each in amount.parts if each.operation != "combine"]
        assert [each.coded for each in weighing] == [((stored, each.size),) for each in weighing]


def test_on_a_machine_that_was_not_measured_a_file_computes_as_fast_as_a_shape_in_its_format() -> None:
    file, shape = coded_as(MODEL, "q4_0"), replace(MODEL, format="q4_0")
    in_file, in_shape = (Operations(each, "bfloat16").expert(64) for each in (file, shape))
    assert in_file.kernel_rate == in_shape.kernel_rate < 1
    assert in_file == in_shape._replace(parts=in_file.parts)


def test_layers_of_q4_k_m_cost_what_their_formats_cost() -> None:
    layers = Operations(coded_as(MODEL, "q4_k_m"), "bfloat16").by_layer
    formats = {tuple(name for name, _ in each.expert_product.coded) for each in layers}
    assert formats == {("q4_k",), ("q4_k", "q6_k")}
    assert dict(layers[0].sample(1).parts[0].coded).keys() == {"q6_k"}
    table = [replace(each, operation="resident expert", size=3 * each.size) for each in ROUTES]
    costs = Calibrated(measured(*table, *PRODUCTS), "bfloat16")
    [few], [more] = (
        {each.resident_expert(1).parts for each in layers if len(each.expert_product.coded) == count}
        for count in (1, 2)
    )
    assert costs.seconds(more[0]) / costs.seconds(few[0]) == pytest.approx((2 * 0.5 + 2.0) / 3 / 0.5)

"""The layout of weights in pages: complete, aligned, bounded, and the same for everybody."""

from __future__ import annotations

import math
from collections import defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesched.errors import BadInput, PolicyError
from moesched.models.config import ITEM_BYTES, ModelConfig
from moesched.models.layout import Page, WeightLayout, weight_layout
from moesched.models.reading import runs
from moesched.models.shapes import SHAPES
from moesched.models.tensors import count_weights, dense_shapes, expert_shapes, global_shapes, tensor_shapes

MIXTRAL = SHAPES["mixtral-0.8b"]


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    experts = draw(st.integers(1, 4))
    kv_heads = draw(st.integers(1, 3))
    return MIXTRAL.varied(
        layers=draw(st.integers(1, 3)),
        hidden=draw(st.integers(1, 40)),
        intermediate=draw(st.integers(1, 300)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=2 * draw(st.integers(1, 5)),
        experts=experts,
        top_k=draw(st.integers(1, experts)),
        tied_embeddings=draw(st.booleans()),
        transposed_down=draw(st.booleans()),
        qk_norm=draw(st.sampled_from([None, "head", "projection"])),
    )


@st.composite
def layouts(draw: st.DrawFn) -> WeightLayout:
    config = draw(configs())
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    largest_row = max(math.prod(shape[1:] or shape) for shape in _paged_shapes(config).values())
    smallest = largest_row * ITEM_BYTES[dtype]
    return weight_layout(config, dtype, smallest + draw(st.integers(0, 4 * smallest)))


def _paged_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    shapes = tensor_shapes(config)
    for name in global_shapes(config):
        del shapes[name]
    return shapes


@given(layout=layouts())
def test_every_row_of_every_tensor_is_in_one_place(layout: WeightLayout) -> None:
    rows = defaultdict(list)
    for page in layout.pages:
        for extent in page.extents:
            rows[extent.tensor].append(extent.rows)
    shapes = _paged_shapes(layout.config)
    assert rows.keys() == shapes.keys()
    for name, pieces in rows.items():
        assert [0, *(stop for _, stop in pieces)] == [*(start for start, _ in pieces), shapes[name][0]]


@given(layout=layouts())
def test_extents_are_aligned_do_not_overlap_and_fit_in_their_page(layout: WeightLayout) -> None:
    shapes = _paged_shapes(layout.config)
    for page in layout.pages:
        end = 0
        for extent in page.extents:
            row_bytes = math.prod(shapes[extent.tensor][1:]) * ITEM_BYTES[layout.dtype]
            assert extent.nbytes == (extent.rows[1] - extent.rows[0]) * row_bytes > 0
            assert extent.offset % 64 == 0
            assert extent.offset >= end
            end = extent.offset + extent.nbytes
            if extent.tensor.endswith("norm"):
                assert extent.rows == (0, *shapes[extent.tensor]), "vectors are never cut"
        assert page.nbytes == end <= layout.page_bytes
        parts = sum(extent.rows != (0, shapes[extent.tensor][0]) for extent in page.extents)
        assert parts <= 1, "no page holds parts of two matrices, or two parts of one"


@given(layout=layouts())
def test_pages_are_numbered_by_layer_the_dense_part_first_and_never_mix_experts(layout: WeightLayout) -> None:
    config = layout.config
    in_order: list[Page] = []
    for layer in range(config.layers):
        assert {e.tensor for p in layout.dense(layer) for e in p.extents} == dense_shapes(
            config, layer
        ).keys()
        in_order += layout.dense(layer)
        for expert in range(config.routed.experts):
            pages = layout.expert(layer, expert)
            assert {e.tensor for p in pages for e in p.extents} == expert_shapes(config, layer, expert).keys()
            assert [(p.layer, p.expert, p.index) for p in pages] == [
                (layer, expert, i) for i in range(len(pages))
            ]
            in_order += pages
        assert layout.layer(layer) == layout.dense(layer) + sum(
            (layout.expert(layer, expert) for expert in range(config.routed.experts)), ()
        )
    assert tuple(in_order) == layout.pages
    assert [page.id for page in layout.pages] == list(range(len(layout.pages)))
    assert weight_layout(config, layout.dtype, layout.page_bytes) == layout, "the same for everybody"


@given(layout=layouts())
def test_a_matrix_is_cut_only_where_no_page_holds_it_and_into_the_fewest_equal_parts(
    layout: WeightLayout,
) -> None:
    shapes = _paged_shapes(layout.config)
    for name, (first, *others) in _rows_of_parts(layout).items():
        row_bytes = math.prod(shapes[name][1:]) * ITEM_BYTES[layout.dtype]
        most = layout.page_bytes // row_bytes
        if first == shapes[name][0]:
            assert first * row_bytes <= layout.page_bytes
            continue
        multiple = 128 if most >= 128 else max(power for power in (1, 2, 4, 8, 16, 32) if power <= most)
        assert first % multiple == 0
        assert len(others) + 1 == -(-shapes[name][0] // (most // multiple * multiple))
        assert {*others[:-1]} <= {first}
        assert others[-1] <= first


def _rows_of_parts(layout: WeightLayout) -> dict[str, list[int]]:
    rows = defaultdict(list)
    for page in layout.pages:
        for extent in page.extents:
            rows[extent.tensor].append(extent.rows[1] - extent.rows[0])
    return rows


@pytest.mark.parametrize("name", ["mixtral-8x7b", "mixtral-8x22b", "dbrx", "llama-4-scout", "glm-4.5-air"])
def test_by_default_slots_for_an_expert_are_full_and_layers_take_few_more_pages_than_their_bytes(
    name: str,
) -> None:
    layout = weight_layout(SHAPES[name])
    expert = sum(page.nbytes for page in layout.an_expert)
    assert len(layout.an_expert) * layout.page_bytes <= 1.001 * expert
    for layer in (0, SHAPES[name].layers - 1):
        pages = layout.dense(layer)
        assert len(pages) <= 1.5 * sum(page.nbytes for page in pages) / layout.page_bytes + 1


def test_an_expert_that_a_layer_does_not_have_has_no_pages() -> None:
    layout = weight_layout(MIXTRAL)
    assert layout.expert(3, -1) == layout.expert(3, 8) == ()


@pytest.mark.parametrize("layer", [-1, 8, 99])
def test_pages_of_a_layer_that_is_not_there_are_refused_with_the_layers_that_are(layer: int) -> None:
    layout = weight_layout(MIXTRAL)
    for method, ask in {
        "layer": layout.layer,
        "expert": lambda layer: layout.expert(layer, 0),
        "experts_of": layout.experts_of,
    }.items():
        with pytest.raises(
            PolicyError, match=rf"^layout\.{method}: there is no L{layer}: layers go from 0 to 7$"
        ):
            ask(layer)


def test_by_default_an_expert_is_one_page_or_cut_into_equal_ones_of_at_most_64_mib() -> None:
    layout = weight_layout(MIXTRAL)
    assert len(layout.expert(3, 7)) == 1
    assert len(layout.dense(3)) == 1
    assert layout.page_bytes == 3 * 1024 * 3584 * 2
    sizes = [page.nbytes for page in weight_layout(SHAPES["mixtral-8x7b"]).expert(0, 0)]
    assert sizes == 6 * [7168 * 4096 * 2]


def test_what_lies_outside_the_pages_is_counted() -> None:
    layout = weight_layout(MIXTRAL)
    assert layout.globals_bytes == (2 * 32000 * 1024 + 1024) * 2
    assert weight_layout(MIXTRAL, "float32").globals_bytes == 2 * layout.globals_bytes
    tied = weight_layout(msgspec.structs.replace(MIXTRAL, tied_embeddings=True))
    assert tied.globals_bytes == (32000 * 1024 + 1024) * 2


@pytest.mark.parametrize("name", [name for name, config in SHAPES.items() if runs(config)])
def test_the_tensors_of_a_named_shape_have_all_of_its_weights(name: str) -> None:
    tensors = tensor_shapes(SHAPES[name]).values()
    assert sum(map(math.prod, tensors)) == count_weights(SHAPES[name])


def test_pages_too_small_for_a_row_and_unknown_dtypes_are_refused() -> None:
    with pytest.raises(BadInput, match=r"a page of 1,000 bytes .* give at least 2,048"):
        weight_layout(MIXTRAL, page_bytes=1000)
    with pytest.raises(BadInput, match=r"'int3' is unknown; choose one of float32, bfloat16"):
        weight_layout(MIXTRAL, "int3")

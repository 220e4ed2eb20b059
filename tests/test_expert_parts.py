"""An expert applied to part of its rows: the bits of the whole, and only the tiles that have rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from cut_rows import partition
from moesched.devices.native.compiled import availability, instruction_sets
from moesched.devices.native.kernels import NativeKernels
from moesched.devices.products.products import Products
from moesched.devices.torch.expert_parts import Part, apply_expert, apply_to_each, tiles_of
from moesched.models.footprint import EXPERT_TILE

needs_kernels = pytest.mark.skipif(not instruction_sets(), reason=availability())


class Counted(Products):
    """Notes the rows of each product."""

    def __init__(self, kernel: NativeKernels | None = None) -> None:
        super().__init__(kernel)
        self.rows: list[int] = []

    def expert(self, x_nD: torch.Tensor, *matrices: Any) -> torch.Tensor:
        self.rows.append(len(x_nD))
        return super().expert(x_nD, *matrices)

    def expert_into(self, y_nD: torch.Tensor, x_nD: torch.Tensor, *matrices: Any) -> None:
        if self.by_kernel(x_nD, *matrices[:3]):
            self.rows.append(len(x_nD))
        super().expert_into(y_nD, x_nD, *matrices)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "the expert kernel"])
def products(request: pytest.FixtureRequest) -> Iterator[tuple[torch.dtype, Counted]]:
    with ExitStack() as opened:
        opened.enter_context(torch.inference_mode())
        if request.param != "the expert kernel":
            yield getattr(torch, request.param), Counted()
        elif instruction_sets():
            yield torch.bfloat16, opened.enter_context(closing(Counted(NativeKernels(32, threads=1))))
        else:
            pytest.skip("the expert kernel is not built")


HIDDEN, INNER = 256, 512


def random_expert(dtype: torch.dtype) -> Any:
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    return {f"experts.0.{part}": [torch.randn(shape).to(dtype)] for part, shape in shapes.items()}


@pytest.mark.parametrize("rows", [1, 7, 32, 33, 100, EXPERT_TILE, 2 * EXPERT_TILE + 5])
def test_parts_of_an_expert_s_rows_have_the_bits_of_the_whole(
    products: tuple[torch.dtype, Counted], rows: int
) -> None:
    dtype, multiply = products
    torch.manual_seed(rows)
    x_nD = torch.randn(3 + rows, HIDDEN).to(dtype)
    weights = random_expert(dtype)
    span = range(3, 3 + rows)
    whole, parts = torch.zeros_like(x_nD), torch.zeros_like(x_nD)
    apply_expert(Part(x_nD, whole, span, span), 0, weights, multiply)
    for wanted in partition(Random(rows), rows, most=5):
        part = Part(x_nD, parts, span, span[wanted.start : wanted.stop])
        apply_expert(part, 0, weights, multiply)
    assert torch.equal(parts, whole)


def test_rows_of_several_micro_batches_have_the_bits_of_each(products: tuple[torch.dtype, Counted]) -> None:
    dtype, multiply = products
    torch.manual_seed(1)
    weights = random_expert(dtype)
    counts = [3, 40, 7, 20, 5, 32]
    batches = [torch.randn(count, HIDDEN).to(dtype) for count in counts]
    alone = [torch.zeros_like(x_nD) for x_nD in batches]
    for x_nD, y_nD in zip(batches, alone, strict=True):
        apply_expert(Part(x_nD, y_nD, range(len(x_nD)), range(len(x_nD))), 0, weights, multiply)
    multiply.rows.clear()
    together = [torch.zeros_like(x_nD) for x_nD in batches]
    cores: list[int] = []
    parts = [Part(x, y, range(len(x)), range(len(x))) for x, y in zip(batches, together, strict=True)]
    apply_to_each(parts, 0, weights, multiply, cores.append)
    assert all(map(torch.equal, together, alone))
    if multiply.most_rows:
        assert multiply.rows == [40, 3 + 7 + 20, 5, 32], "the kernel reads the weights once for 32 rows"
    else:
        assert multiply.rows == cores == counts


class NewTensors(TorchDispatchMode):
    """Notes the operations that make tensors with memory of their own."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.made: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if result.untyped_storage().data_ptr() != args[0].untyped_storage().data_ptr():
            self.made.append(str(function))
        return result


@needs_kernels
def test_the_kernel_writes_an_expert_s_outputs_where_they_belong() -> None:
    x_nD = torch.randn(12, HIDDEN).to(torch.bfloat16)
    weights, expected, y_nD = random_expert(torch.bfloat16), torch.zeros_like(x_nD), torch.zeros_like(x_nD)
    with closing(Products(NativeKernels(32, threads=1))) as products:
        matrices = [weights[f"experts.0.{name}"] for name in ("gate", "up", "down")]
        expected[3:7] = products.expert(x_nD[3:10], *matrices)[:4]
        part = Part(x_nD, y_nD, range(3, 10), range(3, 7))
        with NewTensors() as new:
            apply_to_each([part], 0, weights, products, lambda rows: None)
    assert new.made == []
    assert y_nD.equal(expected)


@settings(max_examples=30)
@given(st.integers(1, 3 * EXPERT_TILE), st.randoms(use_true_random=False))
def test_only_tiles_with_rows_of_the_part_are_computed(rows: int, choose: Random) -> None:
    for part in partition(choose, rows, most=4):
        tiles = list(tiles_of(range(rows), part))
        kept = [range(rows)[tile][kept or slice(None)] for tile, kept in tiles]
        assert all(kept) and [row for each in kept for row in each] == list(part)
        assert all(tile.start % EXPERT_TILE == 0 and tile.stop <= rows for tile, _ in tiles)

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
from kernel_tables import kernels_of
from moesched.devices.kernels.binder import Binder
from moesched.devices.kernels.layer_weights import Weights
from moesched.devices.kernels.seam import Bound, Case, Kernel
from moesched.devices.kernels.table import KernelTable
from moesched.devices.native.compiled import availability, instruction_sets
from moesched.devices.native.kernels import NativeKernels
from moesched.devices.torch.expert_parts import ExpertPart, ExpertRunner, tiles_of
from moesched.models.footprint import EXPERT_TILE
from small_models import SMALL

needs_kernels = pytest.mark.skipif(not instruction_sets(), reason=availability())


HIDDEN, INNER = 256, 512
CONFIG = SMALL.varied(hidden=HIDDEN, intermediate=INNER)


class Counted(Kernel):
    """Another kernel, which notes the rows of each of its calls."""

    operation = "expert"

    def __init__(self, kernel: Kernel, counts: list[int]) -> None:
        self._kernel = kernel
        self._counts = counts
        self.name = f"{kernel.name}, counted"
        self.independent = kernel.independent

    def refusal(self, case: Case) -> str:
        return self._kernel.refusal(case)

    def bind(self, case: Case, weights: Any, memory: Any) -> Bound:
        run = self._kernel.bind(case, weights, memory)

        def counted(x_nD: torch.Tensor, y_nD: torch.Tensor) -> None:
            self._counts.append(len(x_nD))
            run(x_nD, y_nD)

        return counted


class Experts(ExpertRunner):
    """Notes the rows of each product, and those for which it was asked to set the number of cores."""

    def __init__(self, dtype: torch.dtype, threads: NativeKernels | None) -> None:
        self.dtype = dtype
        self.has_kernel = threads is not None
        self.rows: list[int] = []
        self.cores: list[int] = []
        rows = kernels_of(CONFIG, threads, dtype).table.rows
        table = KernelTable([Counted(row, self.rows) for row in rows if row.operation == "expert"])
        kernels = Binder(table, CONFIG, str(dtype).removeprefix("torch."), "cpu")
        super().__init__(CONFIG, kernels, lambda rows, weights: self.cores.append(rows))


@pytest.fixture(scope="module", params=["float32", "bfloat16", "the expert kernel"])
def experts(request: pytest.FixtureRequest) -> Iterator[Experts]:
    with ExitStack() as opened:
        opened.enter_context(torch.inference_mode())
        if request.param != "the expert kernel":
            yield Experts(getattr(torch, request.param), None)
        elif instruction_sets():
            yield Experts(torch.bfloat16, opened.enter_context(closing(NativeKernels(32, threads=1))))
        else:
            pytest.skip("the expert kernel is not built")


def random_expert(dtype: torch.dtype) -> Weights:
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    return Weights(
        {f"experts.0.{part}": [torch.randn(shape).to(dtype)] for part, shape in shapes.items()},
        CONFIG.layer(0),
    )


@pytest.mark.parametrize("rows", [1, 7, 32, 33, 100, EXPERT_TILE, 2 * EXPERT_TILE + 5])
def test_parts_of_an_expert_s_rows_have_the_bits_of_the_whole(experts: Experts, rows: int) -> None:
    torch.manual_seed(rows)
    x_nD = torch.randn(3 + rows, HIDDEN).to(experts.dtype)
    weights = random_expert(experts.dtype)
    span = range(3, 3 + rows)
    whole, parts = torch.zeros_like(x_nD), torch.zeros_like(x_nD)
    experts.apply_part(ExpertPart(x_nD, whole, span, span), 0, weights)
    for wanted in partition(Random(rows), rows, most=5):
        part = ExpertPart(x_nD, parts, span, span[wanted.start : wanted.stop])
        experts.apply_part(part, 0, weights)
    assert torch.equal(parts, whole)


def test_rows_of_several_micro_batches_have_the_bits_of_each(experts: Experts) -> None:
    torch.manual_seed(1)
    weights = random_expert(experts.dtype)
    counts = [3, 40, 7, 20, 5, 32]
    batches = [torch.randn(count, HIDDEN).to(experts.dtype) for count in counts]
    alone = [torch.zeros_like(x_nD) for x_nD in batches]
    for x_nD, y_nD in zip(batches, alone, strict=True):
        experts.apply_part(ExpertPart(x_nD, y_nD, range(len(x_nD)), range(len(x_nD))), 0, weights)
    experts.rows.clear()
    experts.cores.clear()
    together = [torch.zeros_like(x_nD) for x_nD in batches]
    parts = [ExpertPart(x, y, range(len(x)), range(len(x))) for x, y in zip(batches, together, strict=True)]
    experts.apply(parts, 0, weights)
    assert all(map(torch.equal, together, alone))
    if experts.has_kernel:
        assert experts.rows == [40, 3 + 7 + 20, 5, 32], "the kernel reads the weights once for 32 rows"
    else:
        assert experts.rows == experts.cores == counts


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
    with closing(NativeKernels(32, threads=1)) as threads:
        matrices = [weights[f"experts.0.{name}"] for name in ("gate", "up", "down")]
        expected[3:7] = threads.expert(x_nD[3:10], *matrices)[:4]
        experts = Experts(torch.bfloat16, threads)
        part = ExpertPart(x_nD, y_nD, range(3, 10), range(3, 7))
        with NewTensors() as new:
            experts.apply([part], 0, weights)
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

"""The base of the Triton kernels of `KernelTable`: refuses cases, allocates results, describes matrices' row blocks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import torch

from moesched.models.layers import Layer
from moesched.models.replayed import MOST_TABLES

from . import operators
from .layer_weights import Blocks, Tensor
from .resources import Resources
from .seam import ROWS, Bound, Case, Kernel
from .workspace import Workspace

ALIGNED_BYTES = 16
"""Alignment of the rows of matrices, so that a GPU reads them in its widest loads."""
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""The dtypes of weights and hidden states that the kernels take, with their bytes."""


class Matrix(NamedTuple):
    """A matrix, or a stack with a matrix for each expert, in the form that operators take.

    Attributes:
        table: the number of the first row and the address of each row block; `operators.py` explains it.
        blocks: the row blocks.
    """

    table: Tensor
    blocks: list[Tensor]


class TritonKernel(Kernel):
    """The base of kernels in Triton. A row's bits depend on no other row, as every sum has a fixed order."""

    name = "triton"
    takes = "plain weights on GPUs of compute capability 8.0 and above"
    independent = True
    uses_memory = True

    def __init__(self, resources: Resources) -> None:
        self._config = resources.config
        self._dtype = resources.dtype
        self._device = resources.device
        self._indices = resources.indices
        self._upload = resources.upload
        self._capture = resources.captured
        self._layer_norm = self._config.norm == "layer"
        self._tables: dict[tuple[int, ...], Tensor] = {}

    def refusal(self, case: Case) -> str:
        """Return the reason why a case is refused; empty if the kernel takes the case.

        Refused are the CPU, storage formats other than plain row blocks, dtypes other than bfloat16, float16 and
        float32, rows that are not multiples of 16 bytes, and rare features of models, such as attention sinks.
        """
        if case.device == "cpu":
            return "it is for GPUs"
        if not case.formats <= {ROWS}:
            return "it takes row blocks"
        if case.dtype not in DTYPES:
            return f"it computes in {', '.join(DTYPES)}"
        if case.layer is not None and not _is_usual(case.layer):
            return "it computes no sinks, limits, scales, or biases after attention"
        factors = self._config.embedding_factor, self._config.residual_factor, self._config.logits_factor
        if factors != (1.0, 1.0, 1.0):
            return "it multiplies by no factors"
        widths = [self._config.hidden]
        if case.layer is not None:
            widths += case.attention.attended_width, case.network.intermediate, case.network.shared
        if any(width * DTYPES[case.dtype] % ALIGNED_BYTES for width in widths):
            return f"its rows are multiples of {ALIGNED_BYTES} bytes"
        return ""

    def _captured(self, run: Bound, memory: Workspace) -> Bound:
        """Wrap `run`, which writes to `memory`, so that the GPU replays its launches as a graph, if the device can."""
        return self._capture(run, self.operation, memory)

    def _result(self, memory: Workspace, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor of this name and shape for results; dtype: None for the dtype of hidden states."""
        return memory.tensor(name, *shape, dtype=dtype or self._dtype, device=self._device)

    def _scratch(self, memory: Workspace, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor of this name and shape for intermediate results; dtype: None for that of hidden states."""
        return memory.scratch.tensor(name, *shape, dtype=dtype or self._dtype, device=self._device)

    def _normed(self, norm_D: Tensor, rows: int, memory: Workspace) -> Callable[[Tensor], Tensor]:
        """Return a function (hidden_TD) -> x_TD that normalises `rows` tokens; the next norm overwrites x."""
        x_TD = self._scratch(memory, "normed", rows, self._config.hidden)
        settings = self._config.norm_eps, self._layer_norm

        def normed(hidden_TD: Tensor) -> Tensor:
            operators.norm(hidden_TD, norm_D, *settings, x_TD)
            return x_TD

        return normed

    def _matrix(self, *matrices: Blocks) -> Matrix:
        """Describe a matrix, given as row blocks, or a stack of such matrices, in the form that operators take."""
        most = max(map(len, matrices))
        numbers: list[int] = []
        for blocks in matrices:
            first = 0
            for block in blocks:
                numbers += first, block.data_ptr()
                first += len(block)
            numbers += [first, blocks[-1].data_ptr()] * (most - len(blocks))
        padded = (chain(blocks, [blocks[-1]] * (most - len(blocks))) for blocks in matrices)
        return Matrix(self._table(tuple(numbers)).view(-1, most, 2), [*chain.from_iterable(padded)])

    def _table(self, numbers: tuple[int, ...]) -> Tensor:
        table = self._tables.get(numbers)
        if table is None:
            if len(self._tables) == MOST_TABLES:
                self._tables.clear()
            table = self._tables[numbers] = self._indices(numbers)
        return table


def _is_usual(layer: Layer) -> bool:
    attention = layer.grouped
    network, router = layer.feed_forward, layer.feed_forward.router
    scaled = attention.scale is not None or (router.score == "softmax" and router.scale != 1)
    return network.is_usual and not attention.sinks and "o" not in attention.biases and not scaled


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()

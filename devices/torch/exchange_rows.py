"""The host's memory for rows that a micro-batch copies to or from the accelerator; page-locked for a GPU.

Each micro-batch has memory of its own for its decode steps, allocated once. A task of the next layer overwrites it
after all tasks that read this layer's rows have ended. Prompts have many more rows, but are computed only once: their
memory comes from torch and is given back after the layer.

Shapes in names: T tokens, D hidden size, H heads, K key-value heads, d head size, n rows of experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from moesched.models.config import ModelConfig
from moesched.models.host_buffers import CACHE_LINE
from moesched.steps.plan import Plan

from ..kernels.workspace import Workspace
from ..products.linear import Tensor
from ..shared.arena import aligned_bytes, typed_view
from .compute import Compute
from .locked_memory import locked_if_possible


class Shape(NamedTuple):
    """The shape and the dtype of a tensor."""

    size: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, rounded up to whole cache lines, so that a tensor after it in memory is aligned, too."""
        nbytes = math.prod(self.size) * self.dtype.itemsize
        return -(-nbytes // CACHE_LINE) * CACHE_LINE


class AttentionRows:
    """The host's memory for a micro-batch's rows where the host computes attention.

    Attributes:
        qkv: queries (T, H, d), keys and values (T, K, d).
        attended_TX: attention's output (T, H * d).
        memory: has `attended_TX` under the name "attended", and keeps the kernels that are bound to this tensor.
    """

    def __init__(self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, attended_TX: Tensor) -> None:
        self.qkv = q_THd, k_TKd, v_TKd
        self.attended_TX = attended_TX
        self.memory = Workspace(len(attended_TX), attended=attended_TX)


class RoutedRows(NamedTuple):
    """The host's memory for a micro-batch's rows where the host computes experts.

    Attributes:
        x_TD: the experts' input, a row for each token.
        tokens_n: index of the token of each of the n rows that experts compute.
        x_nD: the input rows of the experts.
        y_nD: the output rows of the experts.
    """

    x_TD: Tensor
    tokens_n: Tensor
    x_nD: Tensor
    y_nD: Tensor


class ExchangeRows:
    """Gives each micro-batch memory on the host for the rows that it exchanges with the accelerator."""

    def __init__(self, plan: Plan, compute: Compute) -> None:
        config, batch = plan.layout.config, plan.batch
        self._locks = not compute.on_cpu
        self._shapes = _Shapes(config, compute.dtype)
        rows = {number: batch.sequences(requests) for number, requests in enumerate(batch.micro_batches)}
        attended = plan.kv.held_by("host") if plan.nodes.attends else ()
        routed = rows if plan.declared.experts_on_host else ()
        shapes = [
            *(self._shapes.attention(rows[number]) for number in attended),
            *(self._shapes.routed(rows[number]) for number in routed),
        ]
        nbytes = sum(shape.nbytes for each in shapes for shape in each)
        if self._locks:
            memory = locked_if_possible(nbytes, compute.accelerator, "memory for exchanged rows")
        else:
            memory = aligned_bytes(max(1, nbytes))
        tensors = _cut(memory, [shape for each in shapes for shape in each])
        self._attention = {number: AttentionRows(*(next(tensors) for _ in range(4))) for number in attended}
        self._routed = {number: RoutedRows(*(next(tensors) for _ in range(4))) for number in routed}

    def attention(self, micro_batch: int, tokens: int) -> AttentionRows:
        """Return memory for attention on the host.

        Args:
            micro_batch: number of the micro-batch.
            tokens: number of tokens that attend.
        """
        own = self._attention.get(micro_batch)
        if own is not None and len(own.attended_TX) == tokens:
            return own
        return AttentionRows(*map(self._allocate, self._shapes.attention(tokens)))

    def routed(self, micro_batch: int, tokens: int) -> RoutedRows:
        """Return memory for experts on the host.

        Args:
            micro_batch: number of the micro-batch.
            tokens: number of tokens that the experts compute.
        """
        own = self._routed.get(micro_batch)
        if own is not None and len(own.x_TD) == tokens:
            return own
        return RoutedRows(*map(self._allocate, self._shapes.routed(tokens)))

    def _allocate(self, shape: Shape) -> Tensor:
        return torch.empty(shape.size, dtype=shape.dtype, pin_memory=self._locks)


class _Shapes:
    """Computes the shapes of the tensors in `AttentionRows` and `RoutedRows`, given a number of tokens."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype

    def attention(self, tokens: int) -> Sequence[Shape]:
        attention = self._config.attention
        queries, keys = (
            (tokens, heads, attention.head_dim) for heads in (attention.heads, attention.kv_heads)
        )
        sizes = queries, keys, keys, (tokens, attention.attended_width)
        return [Shape(size, self._dtype) for size in sizes]

    def routed(self, tokens: int) -> Sequence[Shape]:
        config, rows = self._config, tokens * self._config.routed.top_k
        return [
            Shape((tokens, config.hidden), self._dtype),
            Shape((rows,), torch.int64),
            Shape((rows, config.hidden), self._dtype),
            Shape((rows, config.hidden), self._dtype),
        ]


def _cut(memory: Tensor, shapes: Iterable[Shape]) -> Iterator[Tensor]:
    """Yield a tensor for each shape; the tensors follow each other in `memory`, which is uint8."""
    start = 0
    for shape in shapes:
        yield typed_view(memory, start, shape.size, shape.dtype)
        start += shape.nbytes

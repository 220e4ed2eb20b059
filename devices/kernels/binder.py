"""The binder: finds the kernel for an operation, binds it to weights and memory once, and returns it at later calls."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from moesched.models.config import ModelConfig

from .kernel_weights import KernelWeights
from .layer_weights import Weights
from .seam import OPERATIONS, Bound, Case, Kernel
from .table import KernelTable
from .workspace import Workspace


class Binder:
    """Finds the kernels of a table for the operations of a model, and binds them to weights and memory.

    Args:
        device: device of the accelerator's tensors, such as "cuda".

    Attributes:
        table: the kernel table.
        dtype: name of the dtype of weights and hidden states.
        beside_attention: small tensors that attention reads, such as sinks, by layer and device. Unlike pages of
            weights, they are always in memory.
    """

    def __init__(self, table: KernelTable, config: ModelConfig, dtype: str, device: str) -> None:
        self.table = table
        self._config = config
        self.dtype = dtype
        self._device = device
        self.beside_attention: dict[tuple[int, str], Weights] = {}

    def bound(self, operation: str, weights: KernelWeights[Any], memory: Workspace) -> Bound:
        """Return the function that computes an operation with these weights on the accelerator, for `memory.rows` rows.

        The first call binds a kernel. If `Kernel.uses_memory` is False, `weights` keeps the function for later calls.
        Otherwise `memory` keeps the function if `memory.kept` is True; if it is False, each call binds the kernel anew.
        """
        return (
            memory.bound((operation, weights.number))
            or weights.bounds.get((operation, memory.rows))
            or self._bind(self._case(operation, weights, memory.rows), weights, memory)
        )

    def fused(self, operation: str, weights: KernelWeights[Any], memory: Workspace) -> Bound | None:
        """Return the function that computes an operation with these weights; None if no kernel takes the operation.

        If the result is None, the caller computes the operation's parts one by one.

        memory: receives the results.
        """
        found = memory.bound((operation, weights.number))
        if found is not None:
            return found
        key = operation, memory.rows
        found = weights.bounds.get(key)
        if found is None and key not in weights.refused:
            case = self._case(operation, weights, memory.rows)
            if self.table.find(case):
                return self._bind(case, weights, memory)
            weights.refused.add(key)
        return found

    def attention(self, layer: int, memory: Workspace, *, decodes: bool, on_host: bool = False) -> Bound:
        """Return the function that attends over the KV cache of a layer for `memory.rows` new tokens.

        Args:
            decodes: True in a decode step, which has one new token for each sequence.
            on_host: True for attention on the CPU.
        """
        device = "cpu" if on_host else self._device
        key = "attention", layer, decodes, device
        return memory.bound(key) or self._bind_for(
            memory,
            key,
            Case(
                "attention", memory.rows, frozenset(), self.dtype, device, self._config.layer(layer), decodes
            ),
            self.beside_attention.get((layer, device)),
        )

    def prompt_attention(self, layer: int, rows: int) -> Bound:
        """Return the function that attends from `rows` new tokens to views of a layer's keys and values."""
        described = self._config.layer(layer)
        return self.table.bind(
            Case("prompt_attention", rows, frozenset(), self.dtype, self._device, described),
            self.beside_attention.get((layer, self._device)),
        )

    def expert(
        self, weights: Weights, expert: int | None, rows: int, *, on_host: bool = False
    ) -> tuple[Kernel, Bound]:
        """Return the kernel that runs an expert on `rows` rows, and its function, bound to the expert's weights.

        Args:
            weights: the weights of a layer.
            expert: the expert's number; None for the shared expert.
            on_host: True for the CPU.
        """
        part = weights.expert(expert)
        case = Case(
            "expert",
            rows,
            part.formats(OPERATIONS["expert"]),
            self.dtype,
            "cpu" if on_host else self._device,
            weights.layer,
        )
        kernel = self.table.require(case)
        bound = part.bounds.get(kernel.name)
        if bound is None:
            bound = part.bounds[kernel.name] = self.table.bound_to(kernel, case, part)
        return kernel, bound

    def combine(self, memory: Workspace) -> Bound:
        """Return the function that adds the experts' weighted outputs to the residual, for `memory.rows` tokens."""
        return memory.bound("combine") or self._bind_for(
            memory, "combine", Case("combine", memory.rows, frozenset(), self.dtype, self._device)
        )

    def _case(self, operation: str, weights: KernelWeights[Any], rows: int) -> Case:
        formats = weights.formats(OPERATIONS[operation])
        return Case(operation, rows, formats, self.dtype, self._device, weights.layer)

    def _bind_for(
        self, memory: Workspace, key: Hashable, case: Case, weights: Weights | None = None
    ) -> Bound:
        """Find the first kernel that takes a case, and bind it to weights; `memory` keeps the result under `key`."""
        bound = self.table.bind(case, weights, memory)
        memory.keep(key, bound)
        return bound

    def _bind(self, case: Case, weights: KernelWeights[Any], memory: Workspace) -> Bound:
        kernel = self.table.require(case)
        bound = self.table.bound_to(kernel, case, weights, memory)
        if kernel.uses_memory:
            memory.keep((case.operation, weights.number), bound)
            return bound
        return weights.keep(case.operation, case.rows, bound)

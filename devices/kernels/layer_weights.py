"""Weights for torch's kernels: tensors by name, each as row blocks, and their storage formats."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from moesched.models.layers import Layer

from ..shared.coded import Block, CodedRows, rows_of
from .kernel_weights import EXPERT_PARTS, PARTS_OF_SOME, KernelWeights
from .seam import COLUMNS, PACKED, ROWS, Operation

Tensor = torch.Tensor
Blocks = Sequence[Tensor]
A = TypeVar("A", bound=ctypes.Structure)
_PARTS = (*EXPERT_PARTS, *PARTS_OF_SOME)
Held = list["array[int] | array[float] | Tensor"]
"""Arrays and tensors that a native call's arguments point to."""


class Weights(KernelWeights[Any]):
    """Tensors by name, each as row blocks; a block is a torch tensor, or `CodedRows` in a quantised format."""

    def __init__(
        self, blocks: Mapping[str, Sequence[Block]] = MappingProxyType({}), layer: Layer | None = None
    ) -> None:
        super().__init__(blocks, layer)
        self._formats: dict[str, frozenset[str]] = {}
        self._parts: dict[str, Weights] = {}
        self._prepared: dict[type[ctypes.Structure], tuple[ctypes.Structure, Held]] = {}

    def formats(self, operation: Operation) -> frozenset[str]:
        """Return the storage formats of the blocks of all matrices that an operation reads."""
        known = self._formats.get(operation.name)
        if known is None:
            names = operation.matrices or [name for name in self if not name.endswith("norm")]
            known = frozenset(format_of(block) for name in names for block in self.get(name, ()))
            self._formats[operation.name] = known
        return known

    def addresses(self) -> Hashable:
        """Return the address and shape of each block, by name: equal results mean the same memory."""
        return tuple(
            (name, rows.data_ptr(), rows.shape)
            for name, blocks in self.items()
            for rows in map(rows_of, blocks)
        )

    def expert(self, number: int | None) -> Weights:
        """Return an expert's matrices and biases by names such as "gate"; `number` is None for the shared expert."""
        prefix = "shared_" if number is None else f"experts.{number}."
        return self._parts.get(prefix) or self._part(
            prefix, {part: name for part in _PARTS if (name := prefix + part) in self}
        )

    def matrix(self, name: str) -> Weights:
        """Return weights with only the matrix `name`, renamed to "matrix": the weights of the operation "product"."""
        return self._part(name, {"matrix": name})

    def _part(self, key: str, names: Mapping[str, str]) -> Weights:
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = Weights({own: self[name] for own, name in names.items()}, self.layer)
        return part

    def arguments(self, kind: type[A], prepare: Callable[[Weights, Held], A]) -> A:
        """Return a copy of the C struct from `prepare`: arguments that all native calls with these weights share.

        Args:
            kind: class of the struct.
            prepare: function (weights, held) that makes the struct, called only once for each kind. It appends the
                arrays to which the struct points to the list `held`, which these weights keep alive.
        """
        if kind not in self._prepared:
            held: Held = []
            self._prepared[kind] = prepare(self, held), held
        return kind.from_buffer_copy(self._prepared[kind][0])


def sinks_of(weights: Weights | None) -> Tensor | None:
    """Return the scores of the layer's attention sinks (H), float32; None in a layer without sinks."""
    if not weights or "sinks" not in weights:
        return None
    sinks_H: Tensor = weights["sinks"][0]
    return sinks_H


def format_of(block: Block) -> str:
    """Return the name of the storage format of a block."""
    if isinstance(block, CodedRows):
        return block.format.name
    if block.is_mkldnn:
        return PACKED
    return ROWS if block.is_contiguous() else COLUMNS

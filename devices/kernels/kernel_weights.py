"""The base of the classes that hold weights for the kernels of torch and of MLX."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import TypeVar

from moesched.models.layers import Layer

from .seam import Bound, Operation

T = TypeVar("T")

EXPERT_PARTS = ("gate", "up", "down")
PARTS_OF_SOME = ("gate_up", "gate_bias", "up_bias", "gate_up_bias", "down_bias")
"""Further tensors that the experts of some models have; gate_up takes the place of gate and up."""

MOST_BOUND = 1024
"""Largest number of bound kernels that weights keep: prompts have hundreds of lengths, most of which occur once."""

_numbers = count()


class KernelWeights(dict[str, list[T]]):
    """Tensors by name, each as a list of blocks, and the kernels that are bound to these tensors.

    Attributes:
        layer: the description of the layer that the tensors belong to; None for tensors outside the layers.
        number: the key, beside the operation, under which a `Workspace` keeps kernels bound to these tensors. Each
            object has its own number, but a `WeightStore` gives equal numbers to weights at the same addresses.
        bounds: the bound kernels that do not write to a `Workspace` (`Kernel.uses_memory` is False), by (operation,
            number of rows); kernels of the operation "expert", by the kernel's name instead.
        refused: pairs of operation and number of rows for which there is no kernel.
    """

    def __init__(
        self, blocks: Mapping[str, Sequence[T]] = MappingProxyType({}), layer: Layer | None = None
    ) -> None:
        super().__init__({name: list(each) for name, each in blocks.items()})
        self.layer = layer
        self.number = next(_numbers)
        self.bounds: dict[Hashable, Bound] = {}
        self.refused: set[tuple[str, int]] = set()

    def keep(self, operation: str, rows: int, bound: Bound) -> Bound:
        """Keep a bound kernel for this operation and number of rows, and return it.

        If MOST_BOUND (1024) bound kernels are kept already, all of them are dropped first.
        """
        if len(self.bounds) >= MOST_BOUND:
            self.bounds.clear()
            self.refused.clear()
        self.bounds[operation, rows] = bound
        return bound

    @abstractmethod
    def formats(self, operation: Operation) -> frozenset[str]:
        """Return the storage formats of the blocks of all matrices that an operation reads."""

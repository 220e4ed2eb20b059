"""Weights that kernels are bound to, of any library."""

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
"""Of the experts of some models; gate_up takes the place of gate and up."""

_numbers = count()


class KernelWeights(dict[str, list[T]]):
    """Tensors by name, as blocks, with what kernels keep of them.

    Attributes:
        layer: the description of the layer that they belong to; None outside the layers.
        number: id of the places of the tensors, which weights with others do not have.
        bounds: kernels that are bound to these weights alone, by operation and number of rows.
        refused: pairs of operation and number of rows that no kernel takes.
    """

    def __init__(
        self, blocks: Mapping[str, Sequence[T]] = MappingProxyType({}), layer: Layer | None = None
    ) -> None:
        super().__init__({name: list(each) for name, each in blocks.items()})
        self.layer = layer
        self.number = next(_numbers)
        self.bounds: dict[Hashable, Bound] = {}
        self.refused: set[tuple[str, int]] = set()

    @abstractmethod
    def formats(self, operation: Operation) -> frozenset[str]:
        """The storage formats of an operation's matrices."""

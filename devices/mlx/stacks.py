"""Stacks of resident experts in few arrays: all experts of a layer, or an expert's matrices of all layers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import mlx.core as mx
import torch

from moesched.models.layout import Page, WeightLayout
from moesched.models.published import StackedBy
from moesched.models.tensor_shapes import Shape
from moesched.models.tensors import expert_shapes, is_transposed

from ..kernels.mlx_functions import Array
from ..kernels.mlx_weights import Arrays, stack_of
from ..shared.page_reader import DTYPES
from .memory import shared

PARTS = ("gate", "up", "down")


class Key(NamedTuple):
    """The key of a stack: of a layer's experts, or of an expert in all layers."""

    by: StackedBy
    number: int


class Stacked(Protocol):
    """A stack: expert pages in few large arrays.

    Attributes:
        arrays: all its arrays.
        missing: the ids of its pages that were not copied in yet.
    """

    arrays: list[Array]
    missing: set[int]

    def take(self, page: Page, views: Mapping[str, list[torch.Tensor]]) -> None:
        """Copy the tensors of a page into the arrays."""

    def find(self, page: Page) -> tuple[Arrays, int]:
        """The weights for kernels in which a page's expert is, and its index there."""


class _Block(NamedTuple):
    """A row block of one of an expert's matrices, as a page contains it."""

    page_index: int
    part: str
    shape: Shape


class StackedLayer:
    """All experts of one layer: for each row block of a matrix an array (experts, rows, columns), for `gather_mm`."""

    def __init__(self, layout: WeightLayout, layer: int) -> None:
        config = layout.config
        self._layout = layout
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}
        arrays: dict[str, list[Array]] = {part: [] for part in PARTS}
        for index, part, shape in _blocks(layout):
            array, self._tensors[index, part] = shared((config.routed.experts, *shape), layout.dtype)
            arrays[part].append(array)
        self.arrays = [array for blocks in arrays.values() for array in blocks]
        self._stack = stack_of(arrays, config.layer(layer))
        self.missing = {page.id for page in layout.layer(layer) if page.expert >= 0}

    def take(self, page: Page, views: Mapping[str, list[torch.Tensor]]) -> None:
        """Copy the tensors of a page into the arrays."""
        for part, stored in stored_blocks(self._layout, views):
            self._tensors[page.index, part][page.expert].copy_(stored)
        self.missing.discard(page.id)

    def find(self, page: Page) -> tuple[Arrays, int]:
        """The stack that has a page's expert, and its index there."""
        return self._stack, page.expert


class StackedExpert:
    """One expert of all layers in one array (layers, numbers): prestacking of the cluster paper, section 4.1."""

    def __init__(self, layout: WeightLayout, expert: int) -> None:
        self._layout = layout
        self._spans: dict[_Block, tuple[int, int]] = {}
        end = 0
        for block in _blocks(layout):
            start, end = end, end + math.prod(block.shape)
            self._spans[block] = (start, end)
        layers = range(layout.config.layers)
        self._array, self._tensor = shared((len(layers), end), layout.dtype)
        self.arrays = [self._array]
        self.missing = {page.id for layer in layers for page in layout.expert(layer, expert)}

    def take(self, page: Page, views: Mapping[str, list[torch.Tensor]]) -> None:
        """Copy the tensors of a page into the array."""
        for part, stored in stored_blocks(self._layout, views):
            start, stop = self._spans[_Block(page.index, part, tuple(stored.shape))]
            self._tensor[page.layer, start:stop].view(stored.shape).copy_(stored)
        self.missing.discard(page.id)

    def find(self, page: Page) -> tuple[Arrays, int]:
        """The stack that has a page's expert, and its index there."""
        layer = self._array[page.layer]
        parts: dict[str, list[Array]] = {
            part: [
                layer[start:stop].reshape(1, *block.shape)
                for block, (start, stop) in self._spans.items()
                if block.part == part
            ]
            for part in PARTS
        }
        return stack_of(parts, self._layout.config.layer(page.layer)), 0


def stacks_for(layout: WeightLayout, pages: Iterable[Page]) -> dict[int, Key]:
    """Choose the stack of each resident expert page, by the page's id; some pages are in none.

    Layers of which all experts are resident are stacked by layer. In the other layers, experts that are resident in all
    layers are stacked by expert. No stack is made whose arrays are larger than the system allocates.
    """
    experts = [page for page in pages if page.expert >= 0]
    config, item = layout.config, DTYPES[layout.dtype].itemsize
    in_layer = Counter(page.layer for page in experts)
    whole = {
        layer
        for layer, count in in_layer.items()
        if count == config.routed.experts * layout.pages_per_expert[layer]
    }
    others = [page for page in experts if page.layer not in whole]
    in_expert = Counter(page.expert for page in others)
    matrix = config.hidden * config.routed.intermediate * item
    found: dict[int, Key] = {}
    if _allocates(config.routed.experts * matrix):
        found |= {page.id: Key("layer", page.layer) for page in experts if page.layer in whole}
    if _allocates(config.layers * len(PARTS) * matrix):
        all_layers = sum(layout.pages_per_expert)
        found |= {
            page.id: Key("expert", page.expert) for page in others if in_expert[page.expert] == all_layers
        }
    return found


def open_stack(layout: WeightLayout, key: Key) -> Stacked:
    """Allocate the arrays of a stack, without weights."""
    return (StackedLayer if key.by == "layer" else StackedExpert)(layout, key.number)


def stored_blocks(
    layout: WeightLayout, views: Mapping[str, list[torch.Tensor]]
) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield the row blocks of an expert as the files have them, each after the name of its matrix."""
    for name, blocks in views.items():
        for block in blocks:
            yield _part(name), block.T if is_transposed(layout.config, name) else block


def _blocks(layout: WeightLayout) -> list[_Block]:
    """The blocks of an expert, which are the same in all layers."""
    shapes = expert_shapes(layout.config, 0, 0)
    return [
        _Block(
            page.index, _part(extent.tensor), (extent.rows[1] - extent.rows[0], *shapes[extent.tensor][1:])
        )
        for page in layout.expert(0, 0)
        for extent in page.extents
    ]


def _allocates(nbytes: int) -> bool:
    """Test whether the system allocates an array of that size."""
    return nbytes <= int(mx.device_info().get("max_buffer_length", nbytes))


def _part(name: str) -> str:
    return name.rpartition(".")[2]

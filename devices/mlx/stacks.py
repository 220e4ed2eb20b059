"""Stacks of resident experts' weights in a few large arrays: all experts of one layer, or one expert of all layers."""

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
    """The key of a stack: the experts of one layer, or one expert in all layers.

    Attributes:
        by: "layer" or "expert".
        number: number of that layer or expert.
    """

    by: StackedBy
    number: int


class Stacked(Protocol):
    """A stack: experts' weights that are copied from their pages into a few large arrays.

    Attributes:
        arrays: all arrays of the stack.
        missing: the ids of pages that have not been copied to the arrays yet.
    """

    arrays: list[Array]
    missing: set[int]

    def take(self, page: Page, views: Mapping[str, list[torch.Tensor]]) -> None:
        """Copy the tensors of a page (a part of an expert's weights) into the stack's arrays.

        views: the page's row blocks, top to bottom, by the tensor's canonical name.
        """

    def find(self, page: Page) -> tuple[Arrays, int]:
        """Return weights of one or more experts, as kernels take them, and the index of a page's expert among them."""


class _Block(NamedTuple):
    """A row block of an expert's matrix: consecutive rows that are in one page.

    Attributes:
        page_index: index of the page among the expert's pages.
        part: the matrix, "gate", "up" or "down".
        shape: rows and columns of the block.
    """

    page_index: int
    part: str
    shape: Shape


class StackedLayer:
    """A stack of all experts of one layer, for MLX's `gather_mm`.

    An expert's matrices are cut into row blocks, in the same way for all experts. For each of these row blocks there is
    one array (experts, rows, columns), which has the row block of every expert.
    """

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
        """Copy the tensors of a page into the stack's arrays.

        views: the page's row blocks, top to bottom, by the tensor's canonical name.
        """
        for part, stored in stored_blocks(self._layout, views):
            self._tensors[page.index, part][page.expert].copy_(stored)
        self.missing.discard(page.id)

    def find(self, page: Page) -> tuple[Arrays, int]:
        """Return the weights of all experts of the layer, and the index of a page's expert in these weights."""
        return self._stack, page.expert


class StackedExpert:
    """A stack of the weights of one expert in all layers: one array, with a row for each layer.

    A row has all numbers of the expert's three matrices in that layer. A paper on Apple silicon clusters (RACS'24,
    section 4.1) calls this prestacking.
    """

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
        """Copy the tensors of a page into the row of the array for the page's layer.

        views: the page's row blocks, top to bottom, by the tensor's canonical name.
        """
        for part, stored in stored_blocks(self._layout, views):
            start, stop = self._spans[_Block(page.index, part, tuple(stored.shape))]
            self._tensor[page.layer, start:stop].view(stored.shape).copy_(stored)
        self.missing.discard(page.id)

    def find(self, page: Page) -> tuple[Arrays, int]:
        """Return weights that contain only the page's expert, and the expert's index in them, which is 0."""
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
    """Choose a stack for each resident page of an expert; returns the stack's key by the page's id.

    If all experts of a layer are resident, they are in one stack. In the other layers, an expert that is resident in
    all layers has a stack of its own. There is no stack for arrays larger than the system can allocate; pages without a
    stack are left out of the result.
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
    """Allocate the arrays of a stack, given its key; weights are copied to them later."""
    return (StackedLayer if key.by == "layer" else StackedExpert)(layout, key.number)


def stored_blocks(
    layout: WeightLayout, views: Mapping[str, list[torch.Tensor]]
) -> Iterable[tuple[str, torch.Tensor]]:
    """Yield pairs of a matrix's name ("gate", "up" or "down") and a row block, with rows and columns as in the files.

    views: the page's row blocks, top to bottom, by the tensor's canonical name.
    """
    for name, blocks in views.items():
        for block in blocks:
            yield _part(name), block.T if is_transposed(layout.config, name) else block


def _blocks(layout: WeightLayout) -> list[_Block]:
    """List the row blocks of an expert's matrices by page; these are the same for all experts and layers."""
    shapes = expert_shapes(layout.config, 0, 0)
    return [
        _Block(
            page.index, _part(extent.tensor), (extent.rows[1] - extent.rows[0], *shapes[extent.tensor][1:])
        )
        for page in layout.expert(0, 0)
        for extent in page.extents
    ]


def _allocates(nbytes: int) -> bool:
    """Test whether the system can allocate one array of `nbytes` bytes."""
    return nbytes <= int(mx.device_info().get("max_buffer_length", nbytes))


def _part(name: str) -> str:
    return name.rpartition(".")[2]

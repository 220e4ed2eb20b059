"""Weights as MLX kernels read them: pages in slots, pages that stay, and the experts of a whole layer in stacks.

A layer whose pages all stay has each part of its experts in one array over all of them, which `gather_mm` multiplies
without the host knowing who was routed where. All other pages lie as they were read, each expert for itself. Both take
the bytes of the weights; a stack is filled by way of one page more, while it is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from moesched.memory import Pool, Slot, View
from moesched.models.layout import Page, WeightLayout
from moesched.models.tensors import expert_shapes, is_transposed

from .arena import aligned_bytes
from .mlx_kernels import Array, Stack
from .mlx_memory import Bytes, shared
from .page_reader import PageReader

PARTS = ("gate", "up", "down")


class Weights(NamedTuple):
    """What a view shows of a layer: dense tensors by name, as row blocks, and for each expert its stack and place."""

    dense: dict[str, list[Array]]
    experts: dict[int, tuple[Stack, int]]


class _StackedLayer:
    """All experts of one layer, each part's blocks as arrays (experts, rows, columns)."""

    def __init__(self, layout: WeightLayout, layer: int) -> None:
        self._layout = layout
        self._tensors: dict[tuple[int, str], torch.Tensor] = {}
        arrays: dict[str, list[Array]] = {part: [] for part in PARTS}
        shapes = expert_shapes(layout.config, layer, 0)
        for page in layout.expert(layer, 0):
            for extent in page.extents:
                part, (first, stop) = _part(extent.tensor), extent.rows
                shape = (layout.config.experts, stop - first, *shapes[extent.tensor][1:])
                array, tensor = shared(shape, layout.dtype)
                arrays[part].append(array)
                self._tensors[page.index, part] = tensor
        self.stack = Stack(**arrays, transposed_down=layout.config.transposed_down)
        self.missing = {
            page.id for expert in range(layout.config.experts) for page in layout.expert(layer, expert)
        }

    def take(self, page: Page, views: Mapping[str, list[torch.Tensor]]) -> None:
        """Copy a page's tensors to their places."""
        for name, blocks in views.items():
            for block in blocks:
                stored = block.T if is_transposed(self._layout.config, name) else block
                self._tensors[page.index, _part(name)][page.expert].copy_(stored)
        self.missing.discard(page.id)


class MlxWeights:
    """Where every page of a batch is.

    Args:
        reader: reads pages; on any thread, as long as no kernel is under way that reads the same slot.
    """

    def __init__(self, reader: PageReader, layout: WeightLayout) -> None:
        self._reader = reader
        self._layout = layout
        self._slots: dict[Pool, list[Bytes]] = {}
        self._kept: dict[int, Bytes] = {}
        self._here: set[int] = set()
        self._stacks: dict[int, _StackedLayer] = {}
        self._staging = torch.empty(0, dtype=torch.uint8)

    def begin(self, pools: Iterable[Pool], kept: Iterable[Page]) -> None:
        """Allocate slots, and room for pages that stay; those that stayed before are kept where they stay still."""
        self._slots = {}
        pages = {page.id: page for page in kept}
        experts = Counter(page.layer for page in pages.values() if page.expert >= 0)
        whole = self._layout.config.experts * self._layout.pages_per_expert
        stacked = {layer for layer, count in experts.items() if count == whole}
        self._stacks = {layer: stack for layer, stack in self._stacks.items() if layer in stacked}
        singles = {number for number, page in pages.items() if page.expert < 0 or page.layer not in stacked}
        self._kept = {number: memory for number, memory in self._kept.items() if number in singles}
        self._here &= self._kept.keys()
        for layer in stacked - self._stacks.keys():
            self._stacks[layer] = _StackedLayer(self._layout, layer)
        for number in singles - self._kept.keys():
            self._kept[number] = Bytes(self._reader.bytes_in_slot(pages[number]))
        self._slots = {pool: [Bytes(pool.slot_bytes) for _ in pool.slots] for pool in pools}
        if any(stack.missing for stack in self._stacks.values()):
            self._staging = aligned_bytes(self._reader.slot_bytes)

    def close(self) -> None:
        """Let go of all memory."""
        self.begin((), ())

    def load(self, page: Page) -> None:
        """Read a page that stays, unless it is here already."""
        stacked = self._stacks.get(page.layer) if page.expert >= 0 else None
        if stacked is not None:
            if page.id in stacked.missing:
                self._reader.read(page, self._staging)
                stacked.take(page, self._reader.views(self._staging, page))
                if not any(stack.missing for stack in self._stacks.values()):
                    self._staging = torch.empty(0, dtype=torch.uint8)
        elif page.id not in self._here:
            self._reader.read(page, self._kept[page.id].tensor)
            self._here.add(page.id)

    def fetch(self, page: Page, slot: Slot) -> None:
        """Read a page into a slot."""
        self._reader.read(page, self._slots[slot.pool][slot.index].tensor)

    def show(self, view: View[Any]) -> Weights:
        """The arrays of the pages that a view shows; on the thread that evaluates them."""
        if view.bound is None:
            view.bound = self._bind(view)
        bound: Weights = view.bound
        return bound

    def _bind(self, view: View[Any]) -> Weights:
        dense: dict[str, list[Array]] = {}
        single: dict[int, dict[str, list[Array]]] = {}
        experts: dict[int, tuple[Stack, int]] = {}
        for page, slot in zip(view.pages, view.slots, strict=True):
            if slot.fixed and page.expert >= 0 and page.layer in self._stacks:
                experts[page.expert] = (self._stacks[page.layer].stack, page.expert)
                continue
            memory = self._kept[page.id] if slot.fixed else self._slots[slot.pool][slot.index]
            for name, blocks in self._reader.views(memory.tensor, page).items():
                if page.expert < 0:
                    arrays = [memory.show(block, self._layout.dtype) for block in blocks]
                    dense.setdefault(name.split(".", 2)[2], []).extend(arrays)
                else:
                    transposed = is_transposed(self._layout.config, name)
                    stored = [block.T if transposed else block for block in blocks]
                    arrays = [memory.show(block, self._layout.dtype)[None] for block in stored]
                    parts = single.setdefault(page.expert, {})
                    parts.setdefault(_part(name), []).extend(arrays)
        for expert, parts in single.items():
            experts[expert] = (Stack(**parts, transposed_down=self._layout.config.transposed_down), 0)
        return Weights(dense, experts)


def _part(name: str) -> str:
    return name.rpartition(".")[2]

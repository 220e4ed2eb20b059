"""The weights of a model on MLX: pages that are read into slots on demand, resident pages, and stacks of experts.

Files are read straight into slots and resident pages. The pages of a stack are first read, one after the other, into a
buffer for one page, which is freed when all stacks are loaded. If all experts of a layer are in one stack, one kernel
multiplies by all of them, and the host need not know the router's choices; otherwise the experts run one after the
other. A resident router is kept both in its stored dtype and in float32, the dtype that it is used in.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import torch

from moesched.models.layout import Page, WeightLayout
from moesched.models.tensors import global_shapes
from moesched.steps.memory import Pool
from moesched.steps.plan import Plan
from moesched.steps.views import View
from moesched.tasks import PageTransfer

from ..kernels.mlx_functions import Array
from ..kernels.mlx_weights import Arrays, stack_of
from ..shared.arena import aligned_bytes
from ..shared.page_reader import PageReader
from .memory import Bytes, shared
from .stacks import PARTS, Key, Stacked, open_stack, stacks_for, stored_blocks


class MlxWeights:
    """The weights of one model, which successive batches use.

    Args:
        reader: reads pages into slots, on any thread; no kernel may read a slot meanwhile.

    Attributes:
        globals: the tensors outside the layers, by canonical name; empty on a node without attention.
    """

    def __init__(self, reader: PageReader, layout: WeightLayout) -> None:
        self.globals: dict[str, Array] = {}
        self._reader = reader
        self._layout = layout
        self._slots: dict[Pool, list[Bytes]] = {}
        self._resident: dict[int, Bytes] = {}
        self._read: set[int] = set()
        self._routers: dict[int, list[Array]] = {}
        """The routers of resident pages in float32, by the page's id."""
        self._stacks: dict[Key, Stacked] = {}
        self._key_of: dict[int, Key] = {}
        self._staging = torch.empty(0, dtype=torch.uint8)

    def slot_bytes(self, page: Page) -> int:
        """Return the bytes that a page takes in a slot, plus those of a float32 copy of its router if one is needed."""
        copied = 0
        for extent in page.extents:
            item = self._reader.format_of(extent.tensor).block_bytes
            if _is_router(extent.tensor) and item < mx.float32.size:
                copied += extent.nbytes * mx.float32.size // item
        return self._reader.bytes_in_slot(page) + copied

    @property
    def embedding(self) -> Arrays:
        """The embedding matrix; may be read only on a node that computes attention."""
        return Arrays({"embedding": [self.globals["embedding"]]})

    @property
    def head(self) -> Arrays:
        """The weights of the final norm and the LM head; may be read only on a node that computes attention."""
        matrix_VD = self.globals.get("lm_head", self.globals["embedding"])
        return Arrays({"final_norm": [self.globals["final_norm"]], "lm_head": [matrix_VD.T]})

    def begin(self, plan: Plan) -> None:
        """Allocate slots and resident pages as the plan says; pages that were resident in the last batch stay."""
        self._allocate(plan.weights.pools, [page for pool in plan.weights.resident for page in pool.pages()])
        if plan.nodes.attends and not self.globals:
            self.globals = {name: self._read_global(name) for name in global_shapes(self._layout.config)}

    def close(self) -> None:
        """Free all memory."""
        self._allocate((), ())
        self.globals = {}

    def load(self, task: PageTransfer) -> None:
        """Read the resident pages that a task names, except those that are already in memory."""
        for page in task.pages:
            key = self._key_of.get(page.id)
            if key is not None:
                self._load_into_stack(page, self._stacks[key])
            elif page.id not in self._read:
                self._reader.read(page, self._resident[page.id].tensor)
                self._read.add(page.id)

    def fetch(self, task: PageTransfer) -> None:
        """Read the pages that a task names into the task's slots."""
        for page, slot in zip(task.pages, task.slots, strict=True):
            self._reader.read(page, self._slots[slot.pool][slot.index].tensor)

    def show(self, view: View[Any]) -> Arrays:
        """Return the weights that a view of pages contains; must be called on the thread that evaluates arrays.

        view: pages of one layer with the slots that they are in.
        """
        if view.bound is None:
            view.bound = self._bind(view)
        bound: Arrays = view.bound
        return bound

    def touch(self) -> int:
        """Read one element of every array of resident weights; returns the number of arrays."""
        stacked = [array for stack in self._stacks.values() for array in stack.arrays]
        arrays = [*self.globals.values(), *(memory.array for memory in self._resident.values()), *stacked]
        mx.eval([one_item(array) + 0 for array in arrays])
        return len(arrays)

    def _allocate(self, pools: Iterable[Pool], resident: Iterable[Page]) -> None:
        self._slots = {}
        pages = {page.id: page for page in resident}
        self._key_of = stacks_for(self._layout, pages.values())
        keys, singles = set(self._key_of.values()), pages.keys() - self._key_of.keys()
        self._stacks = {key: stack for key, stack in self._stacks.items() if key in keys}
        self._resident = {number: memory for number, memory in self._resident.items() if number in singles}
        self._read &= self._resident.keys()
        self._routers = {number: found for number, found in self._routers.items() if number in singles}
        self._stacks |= {key: open_stack(self._layout, key) for key in keys - self._stacks.keys()}
        self._resident |= {
            number: Bytes(self._reader.bytes_in_slot(pages[number]))
            for number in singles - self._resident.keys()
        }
        self._slots = {pool: [Bytes(pool.slot_bytes) for _ in pool.slots] for pool in pools}
        self._stage(self._reader.slot_bytes if self._is_incomplete() else 0)

    def _read_global(self, name: str) -> Array:
        array, tensor = shared(global_shapes(self._layout.config)[name], self._reader.format_of(name).name)
        self._reader.read_tensor_into(name, tensor.view(-1).view(torch.uint8))
        return array

    def _load_into_stack(self, page: Page, stack: Stacked) -> None:
        if page.id in stack.missing:
            self._reader.read(page, self._staging)
            stack.take(page, self._reader.views(self._staging, page))
            if not self._is_incomplete():
                self._stage(0)

    def _bind(self, view: View[Any]) -> Arrays:
        layer = self._layout.config.layer(view.pages[0].layer)
        dense: dict[str, list[Array]] = {}
        experts: dict[int, tuple[Arrays, int]] = {}
        single: dict[int, dict[str, list[Array]]] = {}
        for page, slot in zip(view.pages, view.slots, strict=True):
            key = self._key_of.get(page.id) if slot.fixed else None
            if key is not None:
                if page.index == 0:
                    experts[page.expert] = self._stacks[key].find(page)
                continue
            memory = self._resident[page.id] if slot.fixed else self._slots[slot.pool][slot.index]
            views = self._reader.views(memory.tensor, page)
            if page.expert < 0:
                for name, blocks in views.items():
                    arrays = [memory.show(block) for block in blocks]
                    if slot.fixed and _is_router(name):
                        # Made when the first step uses it.
                        made = [array.astype(mx.float32) for array in arrays]
                        arrays = self._routers.setdefault(page.id, made)
                    dense.setdefault(name.split(".", 2)[2], []).extend(array.T for array in arrays)
                continue
            parts = single.setdefault(page.expert, {part: [] for part in PARTS})
            for part, block in stored_blocks(self._layout, views):
                parts[part].append(memory.show(block)[None])
        for expert, parts in single.items():
            experts[expert] = (stack_of(parts, layer), 0)
        if "q" in dense:
            dense["qkv"] = [*dense.pop("q"), *dense.pop("k"), *dense.pop("v")]
        return Arrays(dense, layer, experts)

    def _is_incomplete(self) -> bool:
        return any(stack.missing for stack in self._stacks.values())

    def _stage(self, nbytes: int) -> None:
        self._staging = aligned_bytes(nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)


def _is_router(name: str) -> bool:
    return name.endswith(".router")


def one_item(array: Array) -> Array:
    """Return the first element of an array.

    The array is not flattened for this, since a large array has more elements than MLX allows in a dimension.
    """
    return array[(0,) * array.ndim]

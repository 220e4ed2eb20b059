"""The weights of a model on torch: resident pages, and pages that come to slots from files or the host's memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import partial
from typing import Any

import torch

from moesched.models.checkpoint import Checkpoint
from moesched.models.layers import Layer
from moesched.models.layout import Page, WeightLayout
from moesched.seams import Progress, ignore_progress
from moesched.steps.memory import Pool, Slot
from moesched.steps.plan import Plan
from moesched.steps.views import View
from moesched.system.logs import Log
from moesched.tasks import PageTransfer

from ..kernels.layer_weights import Weights
from ..native.mxfp4_files import fastest_join
from ..products.linear import NamedBlocks, Tensor, joined
from ..shared.arena import Arena, aligned_bytes
from ..shared.page_reader import PageReader
from .compute import Compute
from .disk_reads import DiskReads
from .home_pages import HomePages
from .locked_memory import locked_bytes, locked_if_possible
from .mapped_pages import MappedPages
from .page_copies import PageCopies
from .resident_pages import ResidentPages

MOST_ARRANGING = 3
"""Largest number of threads that pack resident pages while others are read; the memory is too slow for more."""

MOST_COPYING = 8
"""Largest number of threads that read pages for a GPU; a single one does not reach the rate of the page cache."""

MOST_PLACES = 4096
"""Largest number of combinations of slots for which a number of weights is kept; streamed weights reuse the slots."""

_log = Log(__name__)


class WeightStore:
    """The weights of one model for successive batches; pages that stay resident from batch to batch are read once.

    Args:
        compute: packs weights for the CPU, or has the GPU that pages are copied to.
        direct: whether to bypass the page cache when reading files, where the system allows that.
        map_files: whether a GPU copies pages directly from the page cache where that is possible.

    Attributes:
        reader: reads pages from the checkpoint's files.
        resident: the resident pages in the memory that kernels read.
        arenas: the memory of each pool's slots, by pool.
        home: the pages that the host's memory keeps, where the accelerator has a memory of its own.
        copies: copies pages from the host's memory to slots.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: WeightLayout,
        compute: Compute,
        *,
        direct: bool,
        map_files: bool,
    ) -> None:
        self.reader = PageReader(checkpoint, layout, direct, fastest_join())
        self.home = HomePages(self.reader, compute, map_files=map_files)
        self.copies = PageCopies(self.reader, compute)
        self._checkpoint = checkpoint
        self._layout = layout
        self._compute = compute
        self._mapping = compute.on_cpu and not direct and MappedPages.possible(self.reader)
        self._mapped: MappedPages | None = None
        self.resident = ResidentPages(self.reader, compute)
        self.arenas: dict[Pool, Arena] = {}
        self._numbers: dict[Hashable, int] = {}
        """For each description of a layer with each combination of addresses, the number of the first weights there."""
        self._host = ""
        self._reading: DiskReads | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes read from the checkpoint's files so far."""
        mapped = self._mapped.bytes_mapped if self._mapped else self.home.bytes_mapped
        return self.reader.bytes_read + mapped

    def begin(self, plan: Plan, tell: Progress = ignore_progress) -> None:
        """Allocate the memory that a batch's plan declares, for the pages that `load` and `fetch` bring in.

        tell: is called with the progress of reading pages to the host's memory.

        Raises:
            MoeschedError: a file cannot be read.
        """
        fast = plan.memory("accelerator")
        missing = self.resident.retain(
            [page for pool in plan.weights.resident if pool.memory is fast for page in pool.pages()]
        )
        if self._mapping and self._mapped is None and plan.machine.unified:
            self._mapped = self._map_files()
        if self._mapped is None:
            self._allocate(plan, tell)
        compute = self._compute
        if compute.kernels.arranges or not missing:
            self.reader.ahead.give_back()
        if missing:
            self.resident.expect(
                missing,
                self._staging(missing, plan.weights.load_buffers) if compute.kernels.arranges else (),
            )
        self._host = "" if plan.machine.unified else plan.memory("host").name
        if self._host:
            self.home.begin(plan, tell)
            if not (compute.on_cpu or (self.home.locked and plan.machine.weights_on_host)):
                self.copies.make_ring()

    def _allocate(self, plan: Plan, tell: Progress) -> None:
        total, done = sum(pool.nbytes for pool in plan.weights.pools), 0
        for pool in plan.weights.pools:
            tell("allocating memory", done, total)
            self.arenas[pool] = self._arena(pool, plan)
            done += pool.nbytes

    def let_go(self) -> None:
        """Free the previous batch's memory, except resident weights, which the next batch may keep."""
        self.resident.close()
        self.arenas = {}
        self._numbers = {}
        if self._mapped is not None:
            self._mapped.hide()

    def close(self) -> None:
        """Free everything, and close the files."""
        self.let_go()
        self.resident.retain([])
        self.home.close()
        self.copies.close()
        if self._reading is not None:
            self._reading.close()
        if self._mapped is not None:
            self._mapped.close()
        self.reader.close()

    def load(self, task: PageTransfer) -> None:
        """Start to load the resident pages that a task names; pages of the host that `begin` has read are left out."""
        for page, slot in zip(task.pages, task.slots, strict=True):
            if slot.memory != self._host or self.home.get(page) is None:
                self.resident.load(page)

    def fetch(self, task: PageTransfer) -> None:
        """Read the pages that a task names into the task's slots; if files are mapped, map the pages instead."""
        pairs = list(zip(task.pages, task.slots, strict=True))
        if self._mapped is not None:
            for page, slot in pairs:
                self._mapped.bring(page, slot)
            return
        if self._reading is None:
            self._reading = DiskReads()
        self._reading.run(
            [read for page, slot in pairs for read in self.reader.reads(page, self.bytes(slot))]
        )

    def weights(self, view: View[Any]) -> Weights:
        """Return the tensors of the pages of weights in a view, by their names within the layer.

        view: pages of one layer with the slots that they are in.
        """
        if view.bound is None:
            view.bound = merged_tensors(
                (
                    self._staying(page, slot) if slot.fixed else self._streamed(page, slot)
                    for page, slot in zip(view.pages, view.slots, strict=True)
                ),
                joins=not self._compute.on_cpu,
                layer=self._layout.config.layer(view.pages[0].layer),
            )
            if not self._compute.on_cpu:
                self._number(view.bound)
        bound: Weights = view.bound
        return bound

    def _number(self, weights: Weights) -> None:
        """Set `weights.number` to that of earlier weights at the same addresses, in a layer of equal description.

        Weights without such a predecessor keep their number. Kernels are bound to a number, so those that were bound to
        the earlier weights are used again.
        """
        if len(self._numbers) == MOST_PLACES:
            self._numbers.clear()
        weights.number = self._numbers.setdefault((weights.layer, weights.addresses()), weights.number)

    def bytes(self, slot: Slot) -> Tensor:
        """Return the memory of a slot of a pool, uint8."""
        return self.arenas[slot.pool].slot(slot.index)

    def _map_files(self) -> MappedPages | None:
        """Map the model's files from the page cache; if the system refuses a lease, warn and return None."""
        try:
            return MappedPages(self._checkpoint, self._layout, self.reader)
        except OSError as error:
            self._mapping = False
            _log.warning(
                "pages are copied from the page cache, since others may write to the files",
                reason=error.strerror,
                remedy="own the model's files, put them on a local disk, and end programs that write to them",
            )
            return None

    def _staging(self, pages: int, most: int) -> list[Tensor]:
        """Choose the buffers that resident pages are read to before they are packed or copied to a GPU.

        These are unused slots of pools, or new memory that is freed after the loading.

        Args:
            pages: number of pages to load.
            most: the largest number of buffers, if the accelerator is the CPU.

        Returns:
            uint8 tensors, each for the largest page.
        """
        compute = self._compute
        at_once = min(MOST_ARRANGING + 1, most) if compute.on_cpu else MOST_COPYING
        count = min(pages + 1, compute.cores + 1, at_once)
        size = self.reader.slot_bytes
        unused = [
            arena.slot(index)
            for arena in self.arenas.values()
            if arena.slot_bytes >= size and arena.on_cpu
            for index in range(len(arena))
        ]
        if len(unused) > 1:
            return unused[:count]
        what = "memory that weights are loaded through"
        locked = partial(locked_if_possible, device=compute.accelerator, what=what)
        return [(aligned_bytes if compute.on_cpu else locked)(size) for _ in range(count)]

    def _arena(self, pool: Pool, plan: Plan) -> Arena:
        compute = self._compute
        if compute.on_cpu:
            return Arena(len(pool.slots), pool.slot_bytes)
        if pool.memory is plan.memory("accelerator"):
            zeros = partial(torch.zeros, dtype=torch.uint8, device=compute.accelerator)
            return Arena(len(pool.slots), pool.slot_bytes, zeros)
        return Arena(len(pool.slots), pool.slot_bytes, partial(locked_bytes, device=compute.accelerator))

    def _staying(self, page: Page, slot: Slot) -> NamedBlocks:
        if slot.memory == self._host:
            held = self.home.get(page)
            assert held is not None, "pages that the host computes with are at home, each in one piece"
            return self.reader.views(held.parts[0].memory, page)
        return self.resident[page]

    def _streamed(self, page: Page, slot: Slot) -> NamedBlocks:
        if self._mapped is not None:
            return self._mapped.views(page)
        memory = self.bytes(slot)
        return self.reader.views(memory, page, aligned=not memory.is_cpu)


def merged_tensors(pages: Iterable[NamedBlocks], *, joins: bool, layer: Layer) -> Weights:
    """Collect the tensors of some pages of a layer, by their names within the layer; q, k and v become one, "qkv".

    Args:
        pages: for each page the row blocks of its tensors, by canonical name.
        joins: whether row blocks that follow each other in memory become one block.
        layer: description of the layer.
    """
    merged = Weights(layer=layer)
    for tensors in pages:
        for name, blocks in tensors.items():
            merged.setdefault(name.split(".", 2)[2], []).extend(blocks)
    if "q" in merged:
        merged["qkv"] = [*merged.pop("q"), *merged.pop("k"), *merged.pop("v")]
    if joins:
        merged |= {name: joined(blocks) for name, blocks in merged.items()}
    return merged

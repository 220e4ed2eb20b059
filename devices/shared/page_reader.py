"""Reads the pages of a weight layout from the files of a checkpoint into slots of an arena."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import structlog
import torch

from moesched.errors import MoeschedError
from moesched.models.checkpoint import Blocks, Checkpoint, StoredTensor
from moesched.models.layout import Extent, Page, WeightLayout
from moesched.models.tensors import is_transposed

from .arena import ALIGNMENT, aligned_bytes, round_down, round_up
from .direct_file import DirectFile

CHUNK_BYTES = 4 << 20  # of a converted read; a read straight into a slot is one call, the larger the faster
PIECE_ITEMS = 1 << 15  # up to this many torch copies on the calling thread
_BUFFER_BYTES = CHUNK_BYTES + 2 * ALIGNMENT

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_log = structlog.get_logger(__name__)


class Placement(NamedTuple):
    """The place of a tensor's rows in the slot that holds their page."""

    tensor: str
    rows: tuple[int, int]
    offset: int  # bytes from the start of the slot


class Run(NamedTuple):
    """One read: the blocks of a file that hold neighbouring extents."""

    file: Blocks
    offset: int
    nbytes: int
    needed: int  # bytes up to the end of the last extent
    at: int  # bytes from the start of the slot


class _Plan(NamedTuple):
    """The reads of one page, and the places of its tensors in a slot."""

    placements: tuple[Placement, ...]
    shapes: tuple[tuple[int, ...], ...]  # of each placement's tensor
    runs: tuple[Run, ...]  # none where the page is converted
    nbytes: int


class PageReader:
    """Reads pages into slots: past the page cache where the system allows it and `direct` asks for it.

    A tensor starts anywhere in its file, but a disk is read in blocks of 4096 bytes. So a page is read as the
    blocks that cover it, straight into the slot, and `placements` says where each piece came to lie.
    A page with a tensor that is stored in another dtype than the layout's, or at an offset where no view of
    its dtype can start, is converted on the way and lies at the layout's own offsets.
    Several threads may read at once, each into its own slot.

    on_disk: whether the files are the disk's. slot_bytes: what the largest page takes. converts: whether there are
    pages that do not lie in the files as they are needed. buffer_bytes: what each reading thread holds besides, to
    convert them.
    bytes_read: read from the files so far, in whole blocks. Raises BadInput where a file cannot be opened.
    """

    def __init__(self, checkpoint: Checkpoint, layout: WeightLayout, direct: bool = True) -> None:
        self.dtype = DTYPES[layout.dtype]
        self.bytes_read = 0
        self._counting = threading.Lock()
        self._own = threading.local()
        self._config = checkpoint.config
        self._tensors = checkpoint.tensors
        self._files: dict[Path, Blocks] = {}
        self.on_disk = checkpoint.open is None
        opened: Callable[[Path], Blocks] = checkpoint.open or partial(DirectFile, direct=direct)
        try:
            for path in sorted({stored.file for stored in self._tensors.values()}):
                self._files[path] = opened(path)
        except BaseException:
            self.close()
            raise
        if direct:
            _warn_of_page_cache(self._files)
        self._plans = {page.id: self._plan(page) for page in layout.pages}
        self.slot_bytes = max(map(self.bytes_in_slot, layout.pages))
        self.converts = not all(plan.runs for plan in self._plans.values())
        self.buffer_bytes = _BUFFER_BYTES if self.converts else 0

    def __enter__(self) -> PageReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; no read may be under way."""
        for file in self._files.values():
            file.close()

    def placements(self, page: Page) -> tuple[Placement, ...]:
        """The place of each extent in the page's slot, in the page's order."""
        return self._plans[page.id].placements

    def runs(self, page: Page) -> tuple[Run, ...]:
        """The blocks of the files that hold the page; none where it is converted."""
        return self._plans[page.id].runs

    def bytes_in_slot(self, page: Page) -> int:
        """The bytes that the page takes in a slot of its own."""
        return round_up(self._plans[page.id].nbytes)

    def bytes_to_read(self, page: Page) -> int:
        """The bytes, in whole blocks, that reading the page asks of the files."""
        runs = self._plans[page.id].runs
        if runs:
            return sum(run.nbytes for run in runs)
        ranges = (self._byte_range(extent.tensor, extent.rows) for extent in page.extents)
        return sum(round_up(end) - round_down(start) for start, end in ranges)

    def views(self, slot: torch.Tensor, page: Page) -> dict[str, list[torch.Tensor]]:
        """The page's tensors over the slot's bytes, by canonical name: row blocks, top to bottom; no copy.

        Of a matrix that the files hold transposed, blocks are (outputs, some of the inputs), left to right.
        slot: uint8, on any device, with the bytes that `read` leaves.
        """
        plan = self._plans[page.id]
        items = slot.view(self.dtype)
        first, size = items.storage_offset(), self.dtype.itemsize
        blocks: dict[str, list[torch.Tensor]] = {}
        for (name, _, offset), shape in zip(plan.placements, plan.shapes, strict=True):
            strides = (shape[1], 1) if len(shape) == 2 else (1,)
            block = torch.as_strided(items, shape, strides, first + offset // size)
            blocks.setdefault(name, []).append(block.T if is_transposed(self._config, name) else block)
        return blocks

    def read(self, page: Page, slot: torch.Tensor) -> int:
        """Read the page into the slot (uint8, CPU, at a multiple of 4096) and return the bytes read.

        Raises MoeschedError where the device fails, the file ends early or the slot does not hold the page.
        """
        plan = self._plans[page.id]
        _require_fit(slot, plan.nbytes)
        nbytes = self._read_runs(plan.runs, slot) if plan.runs else self._read_converted(page, slot)
        self._count(nbytes)
        return nbytes

    def read_tensor(self, name: str) -> torch.Tensor:
        """The whole tensor of that canonical name, in the layout's dtype, in memory of its own."""
        shape = self._tensors[name].shape
        items = aligned_bytes(math.prod(shape) * self.dtype.itemsize).view(self.dtype)
        self.read_tensor_into(name, items)
        return items.view(shape)

    def read_tensor_into(self, name: str, items: torch.Tensor) -> None:
        """The same, into as many items (1-D) of the layout's dtype."""
        rows = self._tensors[name].shape[0]
        self._count(self._convert(name, (0, rows), items, aligned_bytes(_BUFFER_BYTES)))

    # ------------------------------------------------------------ planning

    def _plan(self, page: Page) -> _Plan:
        shapes = tuple((e.rows[1] - e.rows[0], *self._tensors[e.tensor].shape[1:]) for e in page.extents)
        if any(self._must_convert(extent.tensor, extent.rows) for extent in page.extents):
            offsets = [extent.offset for extent in page.extents]
            return _Plan(_place(page.extents, offsets), shapes, (), page.nbytes)
        runs, offsets = self._plan_runs(page.extents)
        return _Plan(_place(page.extents, offsets), shapes, runs, runs[-1].at + runs[-1].nbytes)

    def _plan_runs(self, extents: tuple[Extent, ...]) -> tuple[tuple[Run, ...], list[int]]:
        """The reads that fetch the extents, file neighbours as one, and each extent's place in the slot."""
        runs: list[Run] = []
        offsets = [0] * len(extents)
        for index in sorted(range(len(extents)), key=lambda i: self._place_in_files(extents[i])):
            extent = extents[index]
            file = self._files[self._tensors[extent.tensor].file]
            start, end = self._byte_range(extent.tensor, extent.rows)
            last = runs[-1] if runs else None
            if last and last.file is file and round_down(start) <= last.offset + last.nbytes:
                runs[-1] = _run_to(file, last.offset, end, last.at)
            else:
                runs.append(_run_to(file, round_down(start), end, last.at + last.nbytes if last else 0))
            offsets[index] = runs[-1].at + start - runs[-1].offset
        return tuple(runs), offsets

    def _place_in_files(self, extent: Extent) -> tuple[Path, int]:
        return self._tensors[extent.tensor].file, self._byte_range(extent.tensor, extent.rows)[0]

    def _byte_range(self, name: str, rows: tuple[int, int]) -> tuple[int, int]:
        """The range of the rows in their file: whole rows, even if only some columns are needed."""
        stored = self._tensors[name]
        row_bytes = _row_bytes(stored)
        return stored.offset + rows[0] * row_bytes, stored.offset + rows[1] * row_bytes

    def _must_convert(self, name: str, rows: tuple[int, int]) -> bool:
        stored = self._tensors[name]
        lies_otherwise = DTYPES[stored.dtype] != self.dtype or stored.columns is not None
        return lies_otherwise or self._byte_range(name, rows)[0] % self.dtype.itemsize != 0

    # ------------------------------------------------------------ reading

    def _read_runs(self, runs: tuple[Run, ...], slot: torch.Tensor) -> int:
        memory = slot.numpy().data
        return sum(
            run.file.read(memory[run.at : run.at + run.nbytes], run.offset, run.needed) for run in runs
        )

    def _read_converted(self, page: Page, slot: torch.Tensor) -> int:
        items, size = slot.view(self.dtype), self.dtype.itemsize
        buffer = self._own_buffer()
        return sum(
            self._convert(extent.tensor, extent.rows, items[extent.offset // size :], buffer)
            for extent in page.extents
        )

    def _convert(self, name: str, rows: tuple[int, int], out: torch.Tensor, buffer: torch.Tensor) -> int:
        """Read the rows through the buffer into `out` (1-D); returns the bytes read."""
        stored = self._tensors[name]
        file, stored_as = self._files[stored.file], DTYPES[stored.dtype]
        start, end = self._byte_range(name, rows)
        chunk = CHUNK_BYTES if stored.columns is None else _whole_rows(stored)
        nbytes = done = 0
        for lo in range(start, end, chunk):
            hi = min(lo + chunk, end)
            first, last = round_down(lo), round_up(hi)
            nbytes += file.read(buffer.numpy().data[: last - first], first, hi - first)
            items = _wanted(_typed(buffer[lo - first : hi - first], stored_as), stored)
            _copy_here(items, out[done : done + len(items)])
            done += len(items)
        return nbytes

    def _own_buffer(self) -> torch.Tensor:
        if not hasattr(self._own, "buffer"):
            self._own.buffer = aligned_bytes(_BUFFER_BYTES)
        buffer: torch.Tensor = self._own.buffer
        return buffer

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self.bytes_read += nbytes


def _place(extents: tuple[Extent, ...], offsets: list[int]) -> tuple[Placement, ...]:
    return tuple(Placement(e.tensor, e.rows, at) for e, at in zip(extents, offsets, strict=True))


def _run_to(file: Blocks, offset: int, end: int, at: int) -> Run:
    return Run(file, offset, round_up(end) - offset, end - offset, at)


def _typed(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes as items of dtype; a copy where they start at no multiple of the item's size."""
    if raw.data_ptr() % dtype.itemsize:
        raw = torch.from_numpy(raw.numpy().copy())
    return raw.view(dtype)


def _row_bytes(stored: StoredTensor) -> int:
    """Bytes from one row to the next in the file."""
    if stored.columns is not None:
        return stored.columns.of * DTYPES[stored.dtype].itemsize
    return stored.nbytes // stored.shape[0]


def _whole_rows(stored: StoredTensor) -> int:
    """Bytes of as many rows as are read at once where they are cut."""
    return CHUNK_BYTES // _row_bytes(stored) * _row_bytes(stored)


def _wanted(items: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    """Of whole rows the columns that are wanted, as items in a row."""
    if stored.columns is None:
        return items
    first, of = stored.columns
    return items.view(-1, of)[:, first : first + stored.shape[1]].reshape(-1)


def _copy_here(items: torch.Tensor, out: torch.Tensor) -> None:
    """Copy and convert on this thread alone.

    Torch gives larger pieces to its thread pool; where other lanes keep the cores busy, waiting for the pool
    was measured at 8 ms a call.
    """
    for start in range(0, len(items), PIECE_ITEMS):
        stop = min(start + PIECE_ITEMS, len(items))
        out[start:stop] = items[start:stop]


def _require_fit(slot: torch.Tensor, nbytes: int) -> None:
    if slot.numel() < nbytes:
        raise MoeschedError(f"a slot of {slot.numel()} bytes is too small for {nbytes}; use slot_bytes")
    if slot.data_ptr() % ALIGNMENT:
        raise MoeschedError(f"a slot at {slot.data_ptr():#x} is not aligned to {ALIGNMENT}; use an Arena's")


def _warn_of_page_cache(files: Mapping[Path, Blocks]) -> None:
    cached = [str(path) for path, file in files.items() if file.caching != "bypassed"]
    if cached:
        _log.warning(
            "the file system refuses reads past the page cache; disk timings may be those of memory",
            files=cached,
            remedy="put the model on a local disk (ext4, xfs, apfs)",
        )

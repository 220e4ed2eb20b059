"""The reader of pages (parts of layers' weights) from the files of a checkpoint into slots of memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from moesched.errors import MoeschedError
from moesched.models.checkpoint import Blocks, Checkpoint, StoredTensor
from moesched.models.layout import Page, WeightLayout
from moesched.models.stored_formats import STORED_FORMATS, StoredFormat
from moesched.models.tensor_shapes import Shape
from moesched.models.tensors import is_transposed
from moesched.system.logs import Log
from moesched.system.memory_ahead import MemoryAhead

from .arena import ALIGNMENT, aligned_bytes, round_down, round_up
from .coded import Block, CodedRows
from .direct_file import AbsentFile, BlockRead, DirectFile, parts_of
from .mxfp4_rows import Join, join_by_arrays, read_joined
from .page_location import PageLocation, byte_range, locate, pieces_of

CHUNK_BYTES = 4 << 20  # that are read at once for a conversion
PIECE_ITEMS = 1 << 15  # largest number of items that torch copies on the calling thread
_BUFFER_BYTES = CHUNK_BYTES + 2 * ALIGNMENT

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_log = Log(__name__)


class PagePart(NamedTuple):
    """A range of a page's bytes in memory, uint8; `at` is the range's offset in a slot, in bytes."""

    at: int
    memory: torch.Tensor


class PageReader:
    """Reads pages of weights into slots; several threads may read at once, each into its own slot.

    Args:
        direct: True to read past the page cache where the system allows that.
        join: function that joins MXFP4 codes and scales that are apart in the files.

    Attributes:
        dtype: the layout's dtype. Tensors have it after a read, except those that the model keeps in another format.
        slot_bytes: bytes that the largest page takes in a slot.
        converts: True if some pages must be converted, as the files do not hold them in the form that kernels read.
        buffer_bytes: bytes of each reading thread's buffer for conversions.
        bytes_read: number of bytes read from the files so far, in whole blocks of 4096 bytes.
        ahead: blocks of memory that were allocated ahead of time, for resident weights.

    Raises:
        BadInput: a file cannot be opened.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: WeightLayout,
        direct: bool = True,
        join: Join = join_by_arrays,
    ) -> None:
        self.dtype = DTYPES[layout.dtype]
        self._plain = STORED_FORMATS[layout.dtype]
        self.bytes_read = 0
        self.ahead = MemoryAhead()
        self._counting = threading.Lock()
        self._own = threading.local()
        self._join = join
        self._config = checkpoint.config
        self._tensors = checkpoint.tensors
        self._files: dict[Path, Blocks] = {}
        try:
            for path in sorted({path for stored in self._tensors.values() for path in _files_of(stored)}):
                self._files[path] = (
                    AbsentFile(path) if path in checkpoint.absent else DirectFile(path, direct=direct)
                )
        except BaseException:
            self.close()
            raise
        if direct:
            _warn_of_page_cache(self._files)
        self._locations = {
            page.id: locate(page, self.format_of, self._tensors, self._files) for page in layout.pages
        }
        self.slot_bytes = max(map(self.bytes_in_slot, layout.pages))
        self.converts = not all(location.runs for location in self._locations.values())
        self.buffer_bytes = _BUFFER_BYTES if self.converts else 0

    def __enter__(self) -> PageReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; no read may be running."""
        for file in self._files.values():
            file.close()

    def format_of(self, name: str) -> StoredFormat:
        """Return the format that a tensor, given by its canonical name, has in memory after a read."""
        return self._config.kept_format(name) or self._plain

    def location(self, page: Page) -> PageLocation:
        """Return the location of a page in the files and in a slot."""
        return self._locations[page.id]

    def bytes_in_slot(self, page: Page) -> int:
        """Return the number of bytes that a page of weights takes in a slot."""
        return round_up(max(self._locations[page.id].nbytes, page.nbytes))

    def pieces(self, page: Page, parts: Sequence[PagePart]) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the bytes of a page in pieces, each with its offset in bytes in the weight layout, ascending.

        These offsets are multiples of a cache line, while weights may start anywhere in a file and in a slot. GPUs
        multiply more slowly by weights that do not start at a multiple of 16 bytes.

        parts: the page's bytes as `read` leaves them in a slot.
        """
        for source, target, nbytes in pieces_of(page, self._locations[page.id]):
            for part in parts:
                start, end = max(source, part.at), min(source + nbytes, part.at + len(part.memory))
                if start < end:
                    yield part.memory[start - part.at : end - part.at], target + start - source

    def views(self, slot: torch.Tensor, page: Page, *, aligned: bool = False) -> dict[str, list[Any]]:
        """Return a page's tensors by canonical name, each as a list of row blocks from top to bottom.

        A block is a view of the slot's bytes: a tensor, or `CodedRows` in a quantised format. A matrix that the files
        hold transposed has column blocks from left to right instead: each block has all outputs and some inputs.

        Args:
            slot: uint8, on any device, with the bytes as `read` leaves them.
            aligned: True if the bytes are at the layout's offsets instead, as `pieces` gives them.
        """
        items = slot.view(self.dtype)
        blocks: dict[str, list[Any]] = {}
        for extent, (name, _, shape, placed, stored) in zip(
            page.extents, self._locations[page.id].placements, strict=True
        ):
            offset = extent.offset if aligned else placed
            if stored.codes is not None:
                raw_NB = slot[offset : offset + extent.nbytes].view(shape[0], -1)
                blocks.setdefault(name, []).append(CodedRows(raw_NB, stored))
                continue
            numbers = items if stored == self._plain else slot.view(DTYPES[stored.name])
            strides = (shape[1], 1) if len(shape) == 2 else (1,)
            first = numbers.storage_offset() + offset // numbers.itemsize
            block = torch.as_strided(numbers, shape, strides, first)
            blocks.setdefault(name, []).append(block.T if is_transposed(self._config, name) else block)
        return blocks

    def read(self, page: Page, slot: torch.Tensor, *, cached: bool = False) -> int:
        """Read a page of weights into a slot; returns the number of bytes read.

        Args:
            slot: uint8, on the CPU, at an address that is a multiple of 4096.
            cached: True to take from the page cache the bytes that it has.

        Raises:
            MoeschedError: the disk failed, the file ends early, or the slot is too small or not aligned.
        """
        return sum(read() for read in self.reads(page, slot, cached=cached))

    def reads(self, page: Page, slot: torch.Tensor, *, cached: bool = False) -> list[Callable[[], int]]:
        """Cut the `read` of a page into functions that several threads may call at once.

        Each function reads its own part of the page, and returns the number of bytes read. Arguments are as for `read`.

        Raises:
            MoeschedError: the slot is too small or not aligned.
        """
        location = self._locations[page.id]
        _require_fit(slot, location.nbytes)
        if not location.runs:
            return [partial(self._read_converted, page, slot, cached=cached)]
        memory = slot.numpy().data
        return [
            BlockRead(run.file, *part, self._count, cached)
            for run in location.runs
            for part in parts_of(memory[run.at : run.at + run.nbytes], run.offset, run.needed)
        ]

    def read_tensor(self, name: str) -> Any:
        """Read a tensor, given by its canonical name, into new memory: as `CodedRows` if it is quantised."""
        shape, stored = self._tensors[name].shape, self.format_of(name)
        raw = self.new_memory(math.prod(shape[:-1]) * stored.row_bytes(shape[-1]))
        self.read_tensor_into(name, raw)
        return block_of(raw, shape, stored)

    def new_memory(self, nbytes: int) -> torch.Tensor:
        """Return a uint8 tensor of `nbytes` bytes for resident weights, at an address that is a multiple of 4096.

        The memory is a block of `ahead`, or newly allocated if no block there fits.
        """
        taken = self.ahead.use(nbytes)
        return aligned_bytes(nbytes) if taken is None else torch.frombuffer(taken, dtype=torch.uint8)[:nbytes]

    def read_tensor_into(self, name: str, raw: torch.Tensor) -> None:
        """Read a whole tensor, given by canonical name, into `raw` (uint8, 1-D), if possible from the page cache."""
        stored = self._tensors[name]
        out = raw.view(_dtype_of(self.format_of(name)))
        rows = 0, stored.shape[0]
        start, end = byte_range(stored, rows)
        buffer = aligned_bytes(min(CHUNK_BYTES, end - start) + 2 * ALIGNMENT)
        self._count(self._convert(stored, rows, out, buffer, cached=True))

    def _read_converted(self, page: Page, slot: torch.Tensor, *, cached: bool) -> int:
        buffer, nbytes = self._own_buffer(), 0
        for extent in page.extents:
            stored = self._tensors[extent.tensor]
            raw = slot[extent.offset : extent.offset + extent.nbytes]
            out = raw.view(_dtype_of(self.format_of(extent.tensor)))
            nbytes += self._convert(stored, extent.rows, out, buffer, cached=cached)
        self._count(nbytes)
        return nbytes

    def _convert(
        self,
        stored: StoredTensor,
        rows: tuple[int, int],
        out: torch.Tensor,
        buffer: torch.Tensor,
        *,
        cached: bool,
    ) -> int:
        if stored.scales is not None:
            return read_joined(self._files, stored, stored.scales, rows, out, self._join, cached=cached)
        return _convert(self._files[stored.file], stored, rows, out, buffer, cached=cached)

    def _own_buffer(self) -> torch.Tensor:
        if not hasattr(self._own, "buffer"):
            self._own.buffer = aligned_bytes(_BUFFER_BYTES)
        buffer: torch.Tensor = self._own.buffer
        return buffer

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self.bytes_read += nbytes


def _files_of(stored: StoredTensor) -> list[Path]:
    return [stored.file] if stored.scales is None else [stored.file, stored.scales.file]


def _convert(
    file: Blocks,
    stored: StoredTensor,
    rows: tuple[int, int],
    out: torch.Tensor,
    buffer: torch.Tensor,
    *,
    cached: bool,
) -> int:
    """Read rows of a tensor from a file, and convert them to the dtype of `out`; returns the number of bytes read.

    Args:
        rows: first row, and the row after the last.
        out: receives the numbers, 1-D.
        buffer: memory for the blocks of the file.
        cached: True to take from the page cache the bytes that it has.
    """
    start, end = byte_range(stored, rows)
    chunk = CHUNK_BYTES if stored.columns is None else _whole_rows(stored)
    nbytes = done = 0
    for lo in range(start, end, chunk):
        hi = min(lo + chunk, end)
        first, last = round_down(lo), round_up(hi)
        nbytes += file.read(buffer.numpy().data[: last - first], first, hi - first, cached=cached)
        raw = _wanted(buffer[lo - first : hi - first], stored)
        items = _typed(raw, _dtype_of(stored.format))
        _copy_here(items, out[done : done + len(items)])
        done += len(items)
    return nbytes


def block_of(raw: torch.Tensor, shape: Shape, stored: StoredFormat) -> Block:
    """View the bytes of a tensor (uint8, 1-D) as a tensor of this shape, or as `CodedRows` in a quantised format."""
    if stored.codes is not None:
        return CodedRows(raw.view(shape[0], -1), stored)
    return raw.view(DTYPES[stored.name]).view(shape)


def _dtype_of(stored: StoredFormat) -> torch.dtype:
    """Return the dtype of a plain format's numbers; uint8 for a quantised format."""
    return DTYPES.get(stored.name, torch.uint8)


def _typed(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View bytes as numbers of a dtype; a copy if the bytes do not start at a multiple of the dtype's size."""
    if raw.data_ptr() % dtype.itemsize:
        raw = torch.from_numpy(raw.numpy().copy())
    return raw.view(dtype)


def _whole_rows(stored: StoredTensor) -> int:
    """Return the size in bytes of as many whole rows of a tensor as fit in CHUNK_BYTES.

    This much is read at once if only some columns of the tensor are wanted.
    """
    return CHUNK_BYTES // stored.row_bytes * stored.row_bytes


def _wanted(raw: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    """Return the bytes (1-D) of a tensor's columns, cut out of `raw`, the bytes of whole rows of the stored matrix."""
    if stored.columns is None:
        return raw
    first, count = (stored.format.row_bytes(each) for each in (stored.columns.first, stored.shape[1]))
    return raw.view(-1, stored.row_bytes)[:, first : first + count].reshape(-1)


def _copy_here(items: torch.Tensor, out: torch.Tensor) -> None:
    """Copy numbers to `out`, converted to its dtype, on the calling thread alone.

    Torch converts larger pieces on its thread pool; while other lanes keep the cores busy, waiting for the pool took
    8 ms per call when measured.
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

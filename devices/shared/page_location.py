"""The location of a page of weights: its tensors in the files of a checkpoint, and in a slot of memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from moesched.models.checkpoint import Blocks, StoredTensor
from moesched.models.layout import Extent, Page
from moesched.models.stored_formats import StoredFormat
from moesched.models.tensor_shapes import Shape

from .arena import round_down, round_up


class Placement(NamedTuple):
    """The place of consecutive rows of a tensor in the slot that holds their page."""

    tensor: str
    rows: tuple[int, int]
    shape: Shape
    offset: int  # bytes from the start of the slot
    format: StoredFormat  # of the rows in the slot


class FileRead(NamedTuple):
    """A read of consecutive blocks of a file into a slot; the blocks contain one or several parts of a page.

    Attributes:
        offset: byte of the file at which the blocks begin.
        nbytes: number of bytes of the blocks.
        needed: number of bytes from `offset` to the end of the page's last part in the blocks.
        at: byte of the slot at which the blocks are stored.
    """

    file: Blocks
    offset: int
    nbytes: int
    needed: int
    at: int


class PageLocation(NamedTuple):
    """The blocks of the files that contain a page, and the places of the page's tensors in a slot.

    A tensor may start at any byte of its file, but a disk is read in blocks of 4096 bytes. So the blocks that cover a
    page are read into the slot, where tensors keep their offsets within the blocks. A page must be converted in two
    cases: a tensor in it is stored in another form than kernels read; or the tensor's rows start at an offset where no
    view of its dtype can start. The tensors of a converted page are written to their offsets in the weight layout.

    Attributes:
        placements: the places in the slot of the page's parts, in the page's order; a part is some rows of a tensor.
        runs: the reads that fill the slot; empty if the page is converted.
        nbytes: number of bytes of the slot that are filled.
        bytes_to_read: number of bytes to read from the files for the page, in whole blocks.
    """

    placements: tuple[Placement, ...]
    runs: tuple[FileRead, ...]
    nbytes: int
    bytes_to_read: int


class Piece(NamedTuple):
    """A copy of a range of a page's bytes, from byte `source` of the slot to byte `target` in the weight layout."""

    source: int
    target: int
    nbytes: int


def pieces_of(page: Page, location: PageLocation) -> tuple[Piece, ...]:
    """Return the copies, as few as possible, that move a page from its place in a slot to the layout's offsets."""
    pieces: list[Piece] = []
    for extent, placement in zip(page.extents, location.placements, strict=True):
        last = pieces[-1] if pieces else None
        if last and last.source - last.target == placement.offset - extent.offset:
            pieces[-1] = last._replace(nbytes=extent.offset + extent.nbytes - last.target)
        else:
            pieces.append(Piece(placement.offset, extent.offset, extent.nbytes))
    return tuple(pieces)


def locate(
    page: Page,
    format_of: Callable[[str], StoredFormat],
    tensors: Mapping[str, StoredTensor],
    files: Mapping[Path, Blocks],
) -> PageLocation:
    """Return the location of a page of weights in the files and in a slot.

    Args:
        format_of: function from a tensor's canonical name to the format that kernels need.
        tensors: the stored tensors, by canonical name.
        files: the open files, by path.
    """
    stored = [tensors[extent.tensor] for extent in page.extents]
    formats = [format_of(extent.tensor) for extent in page.extents]
    ranges = [byte_range(each, extent.rows) for each, extent in zip(stored, page.extents, strict=True)]
    if any(map(_must_convert, stored, formats, (start for start, _ in ranges))):
        offsets = [extent.offset for extent in page.extents]
        ranges += [scales_range(each, extent.rows) for each, extent in zip(stored, page.extents, strict=True)]
        to_read = sum(round_up(end) - round_down(start) for start, end in ranges)
        return PageLocation(_placed(page.extents, stored, formats, offsets), (), page.nbytes, to_read)
    runs, offsets = _runs([(each.file, *span) for each, span in zip(stored, ranges, strict=True)], files)
    filled = runs[-1].at + runs[-1].nbytes  # runs follow each other
    return PageLocation(_placed(page.extents, stored, formats, offsets), runs, filled, filled)


def byte_range(stored: StoredTensor, rows: tuple[int, int]) -> tuple[int, int]:
    """Return start and end, as offsets in the file, of a range of rows, with all columns even if only some are needed.

    rows: first row, and the row after the last.
    """
    first, end = rows
    return stored.offset + first * stored.row_bytes, stored.offset + end * stored.row_bytes


def scales_range(stored: StoredTensor, rows: tuple[int, int]) -> tuple[int, int]:
    """Return start and end, as offsets in the file, of the scales of a range of rows.

    The range is empty if the file does not store scales apart from codes.
    """
    if stored.scales is None:
        return 0, 0
    groups = stored.shape[1] // stored.format.group
    return stored.scales.offset + rows[0] * groups, stored.scales.offset + rows[1] * groups


def _must_convert(stored: StoredTensor, needed: StoredFormat, start: int) -> bool:
    if stored.columns is not None or stored.scales is not None or stored.format != needed:
        return True
    return needed.codes is None and start % needed.block_bytes != 0


def _runs(
    spans: list[tuple[Path, int, int]], files: Mapping[Path, Blocks]
) -> tuple[tuple[FileRead, ...], list[int]]:
    """Return the reads that cover spans (path, start, end) of files, and the offset of each span in the slot.

    Reads of neighbouring spans are merged.

    files: the open files, by path.
    """
    runs: list[FileRead] = []
    offsets = [0] * len(spans)
    for index, (path, start, end) in sorted(enumerate(spans), key=itemgetter(1)):
        file, last = files[path], runs[-1] if runs else None
        if last and last.file is file and round_down(start) <= last.offset + last.nbytes:
            runs[-1] = _run_to(file, last.offset, end, last.at)
        else:
            runs.append(_run_to(file, round_down(start), end, last.at + last.nbytes if last else 0))
        offsets[index] = runs[-1].at + start - runs[-1].offset
    return tuple(runs), offsets


def _run_to(file: Blocks, offset: int, end: int, at: int) -> FileRead:
    return FileRead(file, offset, round_up(end) - offset, end - offset, at)


def _placed(
    extents: tuple[Extent, ...],
    stored: list[StoredTensor],
    formats: list[StoredFormat],
    offsets: list[int],
) -> tuple[Placement, ...]:
    return tuple(
        Placement(
            extent.tensor,
            extent.rows,
            (extent.rows[1] - extent.rows[0], *each.shape[1:]),
            offset,
            kept,
        )
        for extent, each, kept, offset in zip(extents, stored, formats, offsets, strict=True)
    )

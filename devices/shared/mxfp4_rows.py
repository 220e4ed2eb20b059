"""Rows in MXFP4 whose codes and scales are apart in the files: they are joined as they are read.

A group is then its scale and 16 bytes, which is what kernels read: the first half of the codes in the lower halves of
the bytes, the others in the upper ones. Files have neighbours in one byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from moesched.models.checkpoint import Blocks, Scales, StoredTensor
from moesched.models.mxfp4 import CODE_BYTES, MXFP4

from .arena import aligned_bytes, round_down, round_up

Bytes = npt.NDArray[np.uint8]
ROWS_AT_ONCE_BYTES = 1 << 20
"""Of codes: what is read and what is written stay in the second-level cache."""


def read_joined(
    files: Mapping[Path, Blocks],
    stored: StoredTensor,
    scales: Scales,
    rows: tuple[int, int],
    out: torch.Tensor,
    *,
    cached: bool,
) -> int:
    """Read rows of a tensor into `out` (uint8, 1-D) as kernels read them; returns the bytes read.

    cached: read what is in the page cache from there.
    """
    first, last = rows
    groups = stored.shape[1] // MXFP4.group
    joined = out.numpy().reshape(last - first, groups, MXFP4.block_bytes)
    of_scales, nbytes = _read(
        files[scales.file], scales.offset + first * groups, (last - first) * groups, cached
    )
    joined[..., MXFP4.scale] = of_scales.reshape(last - first, groups)
    step = max(1, ROWS_AT_ONCE_BYTES // stored.row_bytes)
    for start in range(first, last, step):
        stop = min(start + step, last)
        codes, read = _read(
            files[stored.file],
            stored.offset + start * stored.row_bytes,
            (stop - start) * stored.row_bytes,
            cached,
        )
        nbytes += read
        _put_codes(codes, joined[start - first : stop - first])
    return nbytes


def _read(file: Blocks, offset: int, nbytes: int, cached: bool) -> tuple[Bytes, int]:
    """Bytes of a file, and the number of bytes that were read for them, in whole blocks."""
    begin = round_down(offset)
    memory = aligned_bytes(round_up(offset + nbytes) - begin)
    read = file.read(memory.numpy().data, begin, offset + nbytes - begin, cached=cached)
    return memory.numpy()[offset - begin : offset - begin + nbytes], read


def _put_codes(codes: Bytes, joined: Bytes) -> None:
    """Write codes to rows of groups (N, G, 17), from two halves of 8 bytes for each group."""
    halves = np.ascontiguousarray(codes).view(np.uint64).reshape(-1, 2)
    low, high = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0xF0F0F0F0F0F0F0F0)
    four = np.uint64(4)
    even = (halves[:, 0] & low) | (halves[:, 1] & low) << four
    odd = (halves[:, 0] & high) >> four | (halves[:, 1] & high)
    pairs = even.view(np.uint8).astype(np.uint16) | odd.view(np.uint8).astype(np.uint16) << np.uint16(8)
    rows, groups, _ = joined.shape
    joined[..., 1:] = pairs.view(np.uint8).reshape(rows, groups, CODE_BYTES)

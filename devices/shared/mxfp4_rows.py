"""Reads MXFP4 rows from files that store codes and scales apart, and arranges them as kernels read them.

Kernels read a group of 32 weights as one scale byte and 16 bytes of codes: the lower halves of these bytes are the
first 16 codes, the upper halves the other 16. In the files, such as those of gpt-oss, neighbouring codes share a
byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from moesched.models.checkpoint import Blocks, Scales, StoredTensor
from moesched.models.mxfp4 import CODE_BYTES, MXFP4

from .arena import aligned_bytes, round_down, round_up

Bytes = npt.NDArray[np.uint8]
Join = Callable[[Bytes, Bytes, Bytes], None]
"""A function (codes, scales, joined) that writes G groups in the form that kernels read to `joined`, (G, 17)."""
READ_BYTES = 4 << 20
"""Bytes of codes that are read at once."""


def read_joined(
    files: Mapping[Path, Blocks],
    stored: StoredTensor,
    scales: Scales,
    rows: tuple[int, int],
    out: torch.Tensor,
    join: Join,
    *,
    cached: bool,
) -> int:
    """Read some rows of a tensor, and write their codes joined with their scales to `out`; returns the bytes read.

    Args:
        files: the open files, by path.
        stored: the tensor, with the place of its codes.
        scales: the place of the scales.
        rows: first row, and the row after the last.
        out: receives the rows, uint8, 1-D: 17 bytes for each group of 32 weights.
        join: function that joins codes and scales.
        cached: True to take from the page cache the bytes that it has.
    """
    first, last = (row * (stored.shape[1] // MXFP4.group) for row in rows)
    joined_GB = out.numpy().reshape(-1, MXFP4.block_bytes)
    scales_G, nbytes = _read(files[scales.file], scales.offset + first, last - first, cached)
    step = READ_BYTES // CODE_BYTES
    for start in range(first, last, step):
        stop = min(start + step, last)
        offset, codes_bytes = stored.offset + start * CODE_BYTES, (stop - start) * CODE_BYTES
        codes, read = _read(files[stored.file], offset, codes_bytes, cached)
        part = slice(start - first, stop - first)
        join(codes, scales_G[part], joined_GB[part])
        nbytes += read
    return nbytes


def _read(file: Blocks, offset: int, nbytes: int, cached: bool) -> tuple[Bytes, int]:
    """Read `nbytes` bytes of a file from `offset` on; returns them, and the number of bytes read in whole blocks.

    cached: True to take from the page cache the bytes that it has.
    """
    begin = round_down(offset)
    memory = aligned_bytes(round_up(offset + nbytes) - begin)
    read = file.read(memory.numpy().data, begin, offset + nbytes - begin, cached=cached)
    return memory.numpy()[offset - begin : offset - begin + nbytes], read


def join_by_arrays(codes: Bytes, scales_G: Bytes, joined_GB: Bytes) -> None:
    """Join the codes and the scales of G groups of weights in the form that kernels read.

    Args:
        codes: 16 bytes for each group, with neighbouring codes in one byte.
        scales_G: a byte for each group.
        joined_GB: array (G, 17) that is written: each group's scale, then its codes in the kernels' order.
    """
    first_G8, last_G8 = codes.reshape(-1, 2, CODE_BYTES // 2).swapaxes(0, 1)
    joined_GB[:, 0] = scales_G
    joined_GB[:, 1::2] = first_G8 & 15 | last_G8 << 4
    joined_GB[:, 2::2] = first_G8 >> 4 | last_G8 & 0xF0

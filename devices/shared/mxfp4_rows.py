"""Rows in MXFP4 whose codes and scales are apart in the files: they are joined as they are read.

A group is then its scale and 16 bytes, which is what kernels read: the first half of the codes in the lower halves of
the bytes, the others in the upper ones. Files have neighbours in one byte.
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
"""Writes codes and scales (G) as groups (G, 17)."""
READ_BYTES = 4 << 20
"""Of codes, at once."""


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
    """Read rows of a tensor into `out` (uint8, 1-D) as kernels read them; returns the bytes read.

    cached: read what is in the page cache from there.
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
    """Bytes of a file, and the number of bytes that were read for them, in whole blocks."""
    begin = round_down(offset)
    memory = aligned_bytes(round_up(offset + nbytes) - begin)
    read = file.read(memory.numpy().data, begin, offset + nbytes - begin, cached=cached)
    return memory.numpy()[offset - begin : offset - begin + nbytes], read


def join_by_arrays(codes: Bytes, scales_G: Bytes, joined_GB: Bytes) -> None:
    """Write groups of a scale and 16 bytes of codes: (G, 17)."""
    first_G8, last_G8 = codes.reshape(-1, 2, CODE_BYTES // 2).swapaxes(0, 1)
    joined_GB[:, 0] = scales_G
    joined_GB[:, 1::2] = first_G8 & 15 | last_G8 << 4
    joined_GB[:, 2::2] = first_G8 >> 4 | last_G8 & 0xF0

"""Memory that files are read into and that MLX arrays show, without a copy."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import torch

from ..shared.arena import ALIGNMENT
from ..shared.page_reader import DTYPES

Array = mx.array

ARRAY_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}

_RAW = {4: mx.uint32, 2: mx.uint16}
"""Integer dtypes that numpy has, too, by their size in bytes: it has no bfloat16."""


class Bytes:
    """Memory at a multiple of 4096, which the page reader writes to and kernels read.

    Nothing may be written while a kernel that reads it is running.

    Attributes:
        array: the bytes, uint8, with padding on both sides.
        tensor: the bytes without padding, uint8, which the page reader writes to.
    """

    def __init__(self, nbytes: int) -> None:
        self.array = mx.zeros((nbytes + ALIGNMENT,), dtype=mx.uint8)
        mx.eval(self.array)
        memory = np.array(self.array, copy=False)
        self._skip = -memory.ctypes.data % ALIGNMENT
        self.tensor = torch.from_numpy(memory[self._skip : self._skip + nbytes])

    def show(self, items: torch.Tensor) -> Array:
        """An MLX array over the same bytes as `items`, a contiguous view of `tensor`, in the same dtype."""
        start = self._skip + items.data_ptr() - self.tensor.data_ptr()
        part = self.array[start : start + items.nbytes].view(
            ARRAY_DTYPES[str(items.dtype).removeprefix("torch.")]
        )
        return part.reshape(tuple(items.shape))


def shared(shape: Sequence[int], dtype: str) -> tuple[Array, torch.Tensor]:
    """Make an MLX array of zeros, and a torch tensor over the same memory."""
    raw = mx.zeros(tuple(shape), dtype=_RAW[DTYPES[dtype].itemsize])
    array = raw.view(ARRAY_DTYPES[dtype])
    mx.eval(raw, array)
    return array, torch.from_numpy(np.array(raw, copy=False)).view(DTYPES[dtype])

"""Memory that files are read into and that MLX arrays use without a copy."""

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
"""MLX's integer dtypes, by size in bytes; numpy gets views of arrays in these dtypes, since it has no bfloat16."""


class Bytes:
    """Memory at an address that is a multiple of 4096; the page reader writes to it and kernels read it.

    Nothing may be written to the memory while a kernel that reads it is running.

    Attributes:
        array: the bytes as an MLX array, uint8, with padding on both sides.
        tensor: the bytes as a torch tensor, uint8, without padding; the page reader writes to this tensor.
    """

    def __init__(self, nbytes: int) -> None:
        self.array = mx.zeros((nbytes + ALIGNMENT,), dtype=mx.uint8)
        mx.eval(self.array)
        memory = np.array(self.array, copy=False)
        self._skip = -memory.ctypes.data % ALIGNMENT
        self.tensor = torch.from_numpy(memory[self._skip : self._skip + nbytes])

    def show(self, items: torch.Tensor) -> Array:
        """Return an MLX array over the bytes of `items`, in the same dtype, without a copy.

        items: a contiguous view of a part of `tensor`.
        """
        start = self._skip + items.data_ptr() - self.tensor.data_ptr()
        part = self.array[start : start + items.nbytes].view(
            ARRAY_DTYPES[str(items.dtype).removeprefix("torch.")]
        )
        return part.reshape(tuple(items.shape))


def shared(shape: Sequence[int], dtype: str) -> tuple[Array, torch.Tensor]:
    """Make an MLX array of zeros of a shape and dtype, and a torch tensor over the array's memory."""
    raw = mx.zeros(tuple(shape), dtype=_RAW[DTYPES[dtype].itemsize])
    array = raw.view(ARRAY_DTYPES[dtype])
    mx.eval(raw, array)
    return array, torch.from_numpy(np.array(raw, copy=False)).view(DTYPES[dtype])

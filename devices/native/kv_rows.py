"""A native call that stores new tokens' keys and values in a KV cache in blocks.

`devices/kernels/functions.py` explains the letters of shapes.
"""

from __future__ import annotations

from array import array

from .arguments import NewRows
from .attention import LayerAddresses
from .compiled import library
from .kernels import NativeKernels, Tensor, address


def store(
    kernels: NativeKernels,
    k_TKd: Tensor,
    v_TKd: Tensor,
    cached: LayerAddresses,
    slots: array[int],
    start: int = 0,
) -> None:
    """Copy keys and values of T tokens, contiguous and on the CPU, to slots of a layer's KV cache, by native code.

    Args:
        cached: the layer's KV cache.
        slots: numbers of slots of the cache.
        start: index in `slots` of the first token's slot; the other tokens' slots follow.
    """
    arguments = NewRows(
        tokens=len(k_TKd),
        row_bytes=k_TKd[0].nbytes,
        slots=address(slots) + start * slots.itemsize,
        keys=cached.keys,
        values=cached.values,
        new_keys=k_TKd.data_ptr(),
        new_values=v_TKd.data_ptr(),
    )
    kernels.call(library().moesched_store, arguments)

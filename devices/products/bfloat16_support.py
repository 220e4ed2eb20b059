"""Detection of instructions that multiply bfloat16 numbers."""

from __future__ import annotations

import platform
from functools import cache

import torch


@cache
def has_bfloat16() -> bool:
    """Test whether oneDNN, with which torch was built, uses bfloat16 instructions on this processor.

    With AVX512 but without AVX512_BF16, it says yes and imitates them. Such products are slow for many rows, and their
    bits depend on the number of cores.
    """
    try:
        if platform.machine() in ("x86_64", "AMD64") and not torch.cpu._is_avx512_bf16_supported():
            return False
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False

"""Detects if the processor has instructions that multiply bfloat16 numbers."""

from __future__ import annotations

import platform
from functools import cache

import torch


@cache
def has_bfloat16() -> bool:
    """Test whether torch's oneDNN multiplies by bfloat16 instructions of this processor.

    On processors with AVX512 but without AVX512_BF16, where oneDNN says yes but imitates them, this is False: products
    are slow there for many rows, and their bits depend on the number of cores.
    """
    try:
        if platform.machine() in ("x86_64", "AMD64") and not torch.cpu._is_avx512_bf16_supported():
            return False
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False

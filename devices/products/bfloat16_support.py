"""A test of whether the processor has instructions that multiply bfloat16 numbers."""

from __future__ import annotations

import platform
from functools import cache

import torch


@cache
def has_bfloat16() -> bool:
    """Test whether torch's oneDNN multiplies with bfloat16 instructions of this processor.

    On processors with AVX512 but without AVX512_BF16 the result is False, although oneDNN says that it supports
    bfloat16: it emulates the instructions, so products of many rows are slow, and bits depend on the number of cores.
    """
    try:
        if platform.machine() in ("x86_64", "AMD64") and not torch.cpu._is_avx512_bf16_supported():
            return False
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False

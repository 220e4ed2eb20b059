"""Whether this processor has instructions that multiply bfloat16 numbers."""

from __future__ import annotations

from functools import cache

import torch


@cache
def has_bfloat16() -> bool:
    """As oneDNN, which torch was built with, sees it."""
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False

"""Products with plain matrices, which may lie transposed in memory.

Where the processor has no instructions for bfloat16, torch's own product of a transposed matrix was measured at 40
times the time of the same matrix as it is.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

PIECE_INPUTS = 256  # of a matrix, converted at a time: more would leave the cache


def plain_linear(x_TD: torch.Tensor, weight_ND: torch.Tensor) -> torch.Tensor:
    """x times the matrix's transpose; the matrix's rows or its columns are contiguous."""
    lies_transposed = weight_ND.stride(0) == 1 and weight_ND.stride(1) != 1
    if lies_transposed and weight_ND.dtype == torch.bfloat16 and weight_ND.is_cpu and not _has_bfloat16():
        return _in_float32(x_TD, weight_ND)
    return F.linear(x_TD, weight_ND)


def _in_float32(x_TD: torch.Tensor, weight_ND: torch.Tensor) -> torch.Tensor:
    """The product, some of the inputs at a time, rounded once."""
    y_TN = torch.zeros(len(x_TD), len(weight_ND))
    for start in range(0, x_TD.shape[1], PIECE_INPUTS):
        piece = slice(start, start + PIECE_INPUTS)
        y_TN.addmm_(x_TD[:, piece].float(), weight_ND[:, piece].float().T)
    return y_TN.to(x_TD.dtype)


@cache
def _has_bfloat16() -> bool:
    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False

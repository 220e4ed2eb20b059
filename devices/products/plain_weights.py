"""Products with plain matrices, which may be transposed in memory.

Without bfloat16 instructions, torch's bfloat16 product was measured to take three times as long as a float32 product
for 16 rows, five times for 64, and 40 times for a transposed matrix. For one row bfloat16 is faster; for two rows it
may be faster, too, but with AVX512 the bits then depend on the number of cores.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .bfloat16_support import has_bfloat16
from .row_tiles import in_tiles
from .team import one_core

PIECE = 256
"""Rows or columns of a matrix that are converted at a time, so few that they stay in the cache."""


def plain_linear(x_TD: torch.Tensor, weight_ND: torch.Tensor) -> torch.Tensor:
    """Multiply rows by a plain matrix W whose rows or columns are contiguous: x @ W.T, (T, N)."""
    if weight_ND.dtype == torch.bfloat16 and weight_ND.is_cpu and not has_bfloat16():
        lies_transposed = weight_ND.stride(0) == 1 and weight_ND.stride(1) != 1
        if lies_transposed:
            return _in_float32(x_TD, weight_ND, _add_columns)
        if len(x_TD) > 1:
            return _in_float32(x_TD, weight_ND, _set_rows)
    return in_tiles(F.linear, x_TD, weight_ND)


def _in_float32(
    x_TD: torch.Tensor,
    weight_ND: torch.Tensor,
    multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
) -> torch.Tensor:
    """Compute x @ W.T, (T, N), in float32, rounded once to the dtype of x.

    One core does it, as bits may depend on the number of cores.

    multiply: function (y, x, W) that writes x @ W.T to y, converting W to float32 piece by piece. x and y are float32,
        and y holds zeros before the call.
    """
    y_TN = torch.zeros(len(x_TD), len(weight_ND))
    with one_core():
        multiply(y_TN, x_TD.float(), weight_ND)
    return y_TN.to(x_TD.dtype)


def _add_columns(y_TN: torch.Tensor, x_TD: torch.Tensor, weight_ND: torch.Tensor) -> None:
    for start in range(0, x_TD.shape[1], PIECE):
        piece = slice(start, start + PIECE)
        y_TN.addmm_(x_TD[:, piece], weight_ND[:, piece].float().T)


def _set_rows(y_TN: torch.Tensor, x_TD: torch.Tensor, weight_ND: torch.Tensor) -> None:
    for start in range(0, len(weight_ND), PIECE):
        piece = slice(start, start + PIECE)
        y_TN[:, piece] = x_TD @ weight_ND[piece].float().T

"""Products of many rows in whole tiles of rows, so that oneDNN meets few shapes.

It makes code for each number of rows that it has not met: with bfloat16 instructions that was measured at two to three
milliseconds and half a megabyte each, and prompts bring hundreds. In whole tiles, a matrix and its row blocks, packed
or not, were also seen to give the same bits, which they do not where a tile is left unfinished.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .bfloat16_support import has_bfloat16

TILE = 16
"""The rows of one tile of AMX. Below it, shapes are few."""
CODE_BYTES = 56_000_000
"""Measured bytes of oneDNN's code for the shapes of a run, on processors with bfloat16 instructions."""

Tensor = torch.Tensor


def in_tiles(product: Callable[[Tensor, Tensor], Tensor], x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """`product` of x and a matrix, with rows of zeros that make the last tile whole and are dropped again."""
    rows = len(x_TD)
    missing = -rows % TILE
    if rows < TILE or not missing or x_TD.dtype != torch.bfloat16 or not x_TD.is_cpu or not has_bfloat16():
        return product(x_TD, weight_ND)
    whole_TD = x_TD.new_zeros(rows + missing, x_TD.shape[1])
    whole_TD[:rows] = x_TD
    return product(whole_TD, weight_ND)[:rows]

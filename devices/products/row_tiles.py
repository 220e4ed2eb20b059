"""Products on whole tiles of rows, padded with zeros, so that oneDNN meets few shapes of products.

oneDNN generates code for each new number of rows. With bfloat16 instructions, that was measured to take two to three
milliseconds and half a megabyte each time, and prompts have hundreds of lengths. So rows are padded to whole tiles.
Above 256 rows, their number is rounded up to one of eight evenly spaced numbers from one power of two to the next,
which adds 3 % on average. In tests with whole tiles, a matrix and its row blocks, packed or not, also gave the same
bits; with partial tiles they do not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .bfloat16_support import has_bfloat16

TILE = 16
"""Rows of an AMX tile. Fewer rows are not padded, since they have few shapes."""
CODE_BYTES = 34_000_000
"""Measured bytes of oneDNN's code for the shapes of a run, on processors with bfloat16 instructions."""

Tensor = torch.Tensor


def in_tiles(product: Callable[[Tensor, Tensor], Tensor], x_TD: Tensor, weight_ND: Tensor) -> Tensor:
    """Return `product(x_TD, weight_ND)`; where oneDNN gains by it, x is padded to whole tiles with rows of zeros."""
    rows = len(x_TD)
    missing = -rows % max(TILE, (1 << (rows - 1).bit_length()) // 16)
    if rows < TILE or not missing or x_TD.dtype != torch.bfloat16 or not x_TD.is_cpu or not has_bfloat16():
        return product(x_TD, weight_ND)
    whole_TD = x_TD.new_zeros(rows + missing, x_TD.shape[1])
    whole_TD[:rows] = x_TD
    return product(whole_TD, weight_ND)[:rows]

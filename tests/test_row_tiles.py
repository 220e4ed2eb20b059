"""Products on whole tiles of rows: what a product gets, and what its caller gets back."""

from __future__ import annotations

import pytest
import torch

from moesched.devices.products.bfloat16_support import has_bfloat16
from moesched.devices.products.row_tiles import TILE, in_tiles

needs_bfloat16 = pytest.mark.skipif(
    not has_bfloat16(), reason="only processors that multiply bfloat16 numbers fill up tiles"
)
WEIGHT_ND = torch.arange(6).view(3, 2).bfloat16()


def product(x_TD: torch.Tensor, weight_ND: torch.Tensor) -> torch.Tensor:
    return x_TD @ weight_ND.T


def rows_seen(rows: int) -> int:
    """Number of rows that a product gets where its caller has `rows` of them."""
    seen = []

    def noting(x_TD: torch.Tensor, weight_ND: torch.Tensor) -> torch.Tensor:
        seen.append(len(x_TD))
        return product(x_TD, weight_ND)

    x_TD = torch.arange(2 * rows).remainder(7).view(rows, 2).bfloat16()
    assert torch.equal(in_tiles(noting, x_TD, WEIGHT_ND), product(x_TD, WEIGHT_ND))
    return seen[0]


@needs_bfloat16
def test_a_thousand_numbers_of_rows_are_few_to_a_product() -> None:
    assert len({rows_seen(rows) for rows in range(TILE, 1025)}) == 32


@needs_bfloat16
@pytest.mark.parametrize("rows", [16, 17, 256, 257, 513, 3_000])
def test_at_most_an_eighth_more_rows_are_multiplied(rows: int) -> None:
    assert rows <= rows_seen(rows) < rows + max(TILE, rows / 8)


@pytest.mark.parametrize("rows", [1, 15])
def test_a_partial_tile_alone_is_not_filled_up(rows: int) -> None:
    assert rows_seen(rows) == rows

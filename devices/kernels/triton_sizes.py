"""The tile sizes for products in Triton, which depend on the product, its number of rows and the dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class Tile(NamedTuple):
    """The part of a product that one Triton program computes.

    Attributes:
        rows: rows of x, at least 16: tensor cores take no fewer.
        outputs: rows of the matrix; Hopper's tensor cores take multiples of 64 from shared memory.
        inputs: entries of a row that are read at once.
        warps: number of warps of a program.
        stages: number of reads that are under way at once.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int

    @property
    def launch(self) -> dict[str, Any]:
        """The keyword arguments to launch a kernel with this tile."""
        return {
            "ROWS": self.rows,
            "OUTPUTS": self.outputs,
            "COLUMNS": self.inputs,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


_NARROW = Tile(16, 32, 128, 4, 4), Tile(32, 32, 128, 4, 4)
_ONE = Tile(16, 64, 128, 4, 4), Tile(32, 64, 128, 4, 4), Tile(64, 64, 128, 4, 3), Tile(128, 256, 64, 8, 3)

TILES: dict[str, Sequence[Tile]] = {
    "attention_inputs": (*_NARROW, Tile(64, 32, 128, 4, 3), Tile(128, 64, 64, 8, 3)),
    "output_projection": (*_NARROW, Tile(64, 32, 128, 4, 4), _ONE[3]),
    "gate_and_up": (
        Tile(16, 64, 64, 4, 4),
        Tile(32, 64, 64, 4, 4),
        Tile(64, 64, 64, 4, 4),
        Tile(128, 128, 64, 8, 3),
    ),
    "down": _ONE,
    "logits": _ONE,
}
"""The tiles of each product by ascending number of rows.

The compiler's reports of registers and memory chose them; no GPU has timed them. Projections have few
outputs, so narrow tiles keep more processors busy with few rows. `python -m benchmarks.gpu.tile_sweep` finds the
fastest tiles of a GPU.
"""


def tile_for(product: str, rows: int, dtype: torch.dtype) -> Tile:
    """Return the tile for a product with this number of rows: the smallest that holds them, or else the largest tile.

    Tiles for float32 have at most 32 rows, and half as many inputs: its products do not run on tensor cores, and its
    numbers have twice as many bytes as 16-bit ones.

    product: name of the product, a key of `TILES`.
    """
    tiles = TILES[product]
    if dtype == torch.float32:
        tiles = [tile._replace(inputs=tile.inputs // 2) for tile in tiles if tile.rows <= 32]
    return next((tile for tile in tiles if rows <= tile.rows), tiles[-1])

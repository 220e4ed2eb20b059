"""The choice of the number of cores for each matrix product on the CPU."""

from __future__ import annotations

import torch

from ..products.team import use_cores

ONE_CORE_BYTES = 8 << 20
ONE_CORE_PRODUCTS = 1 << 26
"""Most bytes of weights, and most multiplications, of a product that one core ends before others would start."""


class Cores:
    """Chooses the number of cores for a matrix product by the product's shape alone.

    So equal products have the same bits: the last bits of a product in float32 may depend on the number of cores.
    """

    def __init__(self, cores: int, dtype: torch.dtype) -> None:
        self._cores = cores
        self._itemsize = dtype.itemsize

    def use_for(self, tokens: int, weights: int) -> None:
        """Set how many cores torch uses for this thread's next matrix product: one if it is small, otherwise all.

        Args:
            tokens: number of rows of the product.
            weights: number of entries of the matrix.
        """
        small = tokens * weights <= ONE_CORE_PRODUCTS and weights * self._itemsize <= ONE_CORE_BYTES
        use_cores(1 if small else self._cores)

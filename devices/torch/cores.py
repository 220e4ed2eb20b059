"""The number of cores for each product on the CPU."""

from __future__ import annotations

import torch

from ..products.team import use_cores

ONE_CORE_BYTES = 8 << 20
ONE_CORE_PRODUCTS = 1 << 26
"""Up to these numbers of weights and of multiplications, one core finishes before the others could start."""


class Cores:
    """Chooses the number of cores by shape alone, never by lane or load, since float32 bits may depend on it."""

    def __init__(self, cores: int, dtype: torch.dtype) -> None:
        self._cores = cores
        self._itemsize = dtype.itemsize

    def use_for(self, tokens: int, weights: int) -> None:
        """Let torch use all cores on this thread for a product of these rows and weights, if that is faster."""
        small = tokens * weights <= ONE_CORE_PRODUCTS and weights * self._itemsize <= ONE_CORE_BYTES
        use_cores(1 if small else self._cores)

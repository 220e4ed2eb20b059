"""Products with matrices, computed as the torch device does on the CPU, for calibration to measure their time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch

from ..native.compiled import AUTO, formats
from ..products.coded_linear import coded_linear
from ..products.crossover import Shape
from ..products.linear import linear
from ..products.packed_weights import pack, packing_pays
from ..shared.coded import CodedRows
from .native_products import MOST_COLUMN_ROWS
from .torch_kernels import open_native, rows_for_native

Call = Callable[[], object]

PRODUCT = Shape(2048, 1024)
"""The shape of a matrix of medium size, for which the limit between few and many rows is measured."""


class TimedProducts:
    """Multiplies as the torch device does on the CPU: few rows by the native kernels, more rows by torch.

    Each method `of_...` takes matrices of one shape, and returns a function of a number of rows. This function
    returns another one without arguments, which computes one product of that number of rows with one of the matrices.
    The matrices take turns, so that the cache does not hold them.

    Args:
        threads: number of threads.

    Attributes:
        packing_pays: True if the device packs bfloat16 weights that stay in memory.
    """

    def __init__(self, threads: int) -> None:
        self.packing_pays = packing_pays(cores=threads)
        self._rows = rows_for_native(AUTO, "bfloat16", PRODUCT, self.packing_pays)
        self._native = open_native(AUTO, self._rows, cores=threads)

    def close(self) -> None:
        """End the threads of the native kernels."""
        if self._native is not None:
            self._native.close()

    def of_rows(self, matrices: list[torch.Tensor], *, packed: bool) -> Callable[[int], Call]:
        """Return the function for products with matrices (N, D) that are stored row by row.

        packed: True if torch multiplies by packed copies of the matrices; native kernels always take plain ones.
        """
        inputs, dtype = matrices[0].shape[1], matrices[0].dtype
        plain = cycle([[matrix] for matrix in matrices])
        arranged = cycle([[pack(matrix)] for matrix in matrices]) if packed else plain

        def of_rows(rows: int) -> Call:
            x_TD = torch.full((rows, inputs), 0.01, dtype=dtype)
            native = self._native if dtype == torch.bfloat16 and rows <= self._rows else None
            if native is not None:
                return lambda: native.linear(x_TD, next(plain))
            return lambda: linear(x_TD, next(arranged))

        return of_rows

    def of_columns(self, matrices: list[torch.Tensor]) -> Callable[[int], Call]:
        """Return the function for products with matrices that are stored transposed."""
        inputs, dtype = matrices[0].shape[1], matrices[0].dtype
        turns = cycle([[matrix] for matrix in matrices])

        def of_rows(rows: int) -> Call:
            x_TD = torch.full((rows, inputs), 0.01, dtype=dtype)
            native = self._native if dtype == torch.bfloat16 and rows <= MOST_COLUMN_ROWS else None
            if native is not None:
                return lambda: native.linear_by_columns(x_TD, next(turns))
            return lambda: linear(x_TD, next(turns))

        return of_rows

    def of_coded_rows(
        self, matrices: list[CodedRows], inputs: int, dtype: torch.dtype
    ) -> Callable[[int], Call]:
        """Return the function for products with quantised matrices of one format.

        Args:
            inputs: number of entries in a row of x.
            dtype: dtype of x.
        """
        turns = cycle(matrices)
        native = self._native if dtype == torch.bfloat16 else None
        if native is not None and matrices[0].format.name not in formats():
            native = None

        def of_rows(rows: int) -> Call:
            x_TD = torch.full((rows, inputs), 0.01, dtype=dtype)
            if native is not None:
                return lambda: native.linear(x_TD, [next(turns)])
            return lambda: coded_linear(x_TD, next(turns))

        return of_rows

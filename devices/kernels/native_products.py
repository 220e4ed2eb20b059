"""The native library's kernels for products of a matrix with few rows of bfloat16 inputs."""

from __future__ import annotations

from functools import partial

from .layer_weights import Weights
from .native_kernel import NativeKernel
from .resources import Resources
from .seam import COLUMNS, ROWS, Bound, Case

MOST_COLUMN_ROWS = 16
"""Largest number of rows of x for which these products with transposed matrices are faster than torch's."""


class NativeProduct(NativeKernel):
    """Multiplies rows of bfloat16 by the row blocks of a matrix."""

    operation = "product"

    def refusal(self, case: Case) -> str:
        """Return why a case is refused: row blocks in several formats, or a reason of `NativeKernel`; else empty."""
        several = len(case.formats) > 1
        return super().refusal(case) or ("it reads row blocks in one format" if several else "")

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        return partial(self._threads.linear, blocks=weights["matrix"])


class ByColumns(NativeKernel):
    """A mixin for native kernels that multiply a few rows of bfloat16 by matrices stored transposed.

    A kernel class lists this class first, and then the native kernel's class for matrices stored row by row.
    """

    takes = f"{MOST_COLUMN_ROWS} rows of bfloat16 and less by matrices that are stored transposed, on a CPU"

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources)
        self.name = f"{self.name}, columns"

    def refusal(self, case: Case) -> str:
        """Return the reason why a case is refused; empty if the kernel takes the case.

        Refused are matrices that are not stored transposed, more than 16 rows, and all that the kernel's second base
        class refuses for matrices stored row by row.
        """
        if case.formats != {COLUMNS}:
            return "it reads matrices that are stored transposed"
        if case.rows > MOST_COLUMN_ROWS:
            return f"torch is faster from {MOST_COLUMN_ROWS + 1} rows on"
        return super().refusal(case._replace(formats=frozenset({ROWS})))


class NativeColumns(ByColumns, NativeProduct):
    """Multiplies a few rows of bfloat16 by a matrix that is stored transposed."""

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        return partial(self._threads.linear_by_columns, blocks=weights["matrix"])


NATIVE_PRODUCTS = (NativeProduct, NativeColumns)

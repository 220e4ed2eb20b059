"""The rows that the experts of a layer read on MLX, and their outputs."""

from __future__ import annotations

import mlx.core as mx

from . import kernels
from .kernels import Array, Rows, Stack


class ExpertRows:
    """The rows of a micro-batch in one layer, those of each expert together.

    Args:
        x_TD: the experts' input.
        experts_Tk, weights_Tk: the experts of each token, and their weights.

    Attributes:
        x_nD: the rows.
        experts_n: each row's expert.
        rows_Tk: the row of each pair of token and expert.
        counts: number of rows of each expert; empty until the host knows them.
        many: whether there are at least `kernels.MANY_ROWS`.
    """

    def __init__(self, x_TD: Array, experts_Tk: Array, weights_Tk: Array) -> None:
        tokens_n, self.experts_n, self.rows_Tk = kernels.sort_rows(experts_Tk)
        self.x_nD = x_TD[tokens_n]
        self.weights_Tk = weights_Tk
        self.counts: list[int] = []
        self.many = len(self.x_nD) >= kernels.MANY_ROWS
        self._outputs: dict[int, Array] = {}

    def apply(self, expert: int, stack: Stack, index: int) -> Array:
        """Run one expert on its rows; its output is not evaluated.

        index: of the expert in the stack.
        """
        start, count = sum(self.counts[:expert]), self.counts[expert]
        rows = rows_of_one(count, index, many=self.many)
        self._outputs[expert] = kernels.experts_ffn(self.x_nD[start : start + count], stack, rows)
        return self._outputs[expert]

    def apply_all(self, stack: Stack) -> Array:
        """Run all experts, which are one stack; their outputs (n, D) are not evaluated."""
        return kernels.experts_ffn(self.x_nD, stack, Rows(self.experts_n, None, self.many))

    def outputs_nD(self) -> Array:
        """The experts' outputs, row by row; zeros for experts that have not run here."""
        width = self.x_nD.shape[1]
        return mx.concatenate(
            [
                self._outputs.get(expert, mx.zeros((count, width), dtype=self.x_nD.dtype))
                for expert, count in enumerate(self.counts)
                if count
            ]
        )


def rows_of_one(count: int, index: int, *, many: bool) -> Rows:
    """Rows of one expert, which is at that index of its stack."""
    return Rows(mx.full((count,), index, dtype=mx.uint32), [0] * index + [count], many)

"""The rows that the experts of a layer read on MLX, and their outputs."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from moesched.models.footprint import EXPERT_TILE

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
        counts: number of rows of each expert; empty until the host knows them.
        many: whether there are at least `kernels.MANY_ROWS`.
    """

    def __init__(self, x_TD: Array, experts_Tk: Array, weights_Tk: Array) -> None:
        tokens, top_k = experts_Tk.shape
        self._x_TD = x_TD
        self._rows_Tk: Array | None = None
        """The row of each choice; None for one token, whose experts are in order."""
        if tokens == 1:
            self.experts_n = experts_Tk.reshape(-1)
            self.x_nD = mx.broadcast_to(x_TD, (top_k, x_TD.shape[1]))
        else:
            tokens_n, self.experts_n, self._rows_Tk = kernels.sort_rows(experts_Tk)
            self.x_nD = x_TD[tokens_n]
        self.weights_Tk = weights_Tk
        self.counts: list[int] = []
        self.many = len(self.x_nD) >= kernels.MANY_ROWS
        self._outputs: dict[int, dict[int, Array]] = {}
        """Those of the experts that ran, by expert, then by the first of its rows."""

    def apply(self, expert: int, stack: Stack, index: int, part: range | None = None) -> Array:
        """Run one expert on a part of its rows, or on all; its output is not evaluated.

        Tiles with rows of the part are computed whole: without `kernels.gathers`, bits depend on the other rows.

        Args:
            index: of the expert in the stack.
            part: rows of the expert, counted from its first.
        """
        first, count = sum(self.counts[:expert]), self.counts[expert]
        part = part or range(count)
        start = part.start // EXPERT_TILE * EXPERT_TILE
        stop = min(count, -(-part.stop // EXPERT_TILE) * EXPERT_TILE)
        rows = rows_of_one(stop - start, index, many=self.many)
        x_nD = self._x_TD if self._rows_Tk is None else self.x_nD[first + start : first + stop]
        y_nD = kernels.experts_ffn(x_nD, stack, rows)
        if len(y_nD) > len(part):
            y_nD = mx.contiguous(
                y_nD[part.start - start : part.stop - start]
            )  # a copy: the tile can be freed
        self._outputs.setdefault(expert, {})[part.start] = y_nD
        return y_nD

    def apply_all(self, stack: Stack) -> Array:
        """Run all experts, which are one stack; their outputs (n, D) are not evaluated."""
        return kernels.experts_ffn(self.x_nD, stack, Rows(self.experts_n, None, self.many))

    def arrays(self) -> list[Array]:
        """All that later kernels read."""
        index = [] if self._rows_Tk is None else [self._rows_Tk]
        return [self.x_nD, self.weights_Tk, self.experts_n, *index]

    def by_token(self, y_nD: Array) -> Array:
        """Outputs of the rows (n, D) in the order of the tokens and their experts: (T, k, D)."""
        return y_nD[None] if self._rows_Tk is None else y_nD[self._rows_Tk]

    def outputs_nD(self) -> Array:
        """The experts' outputs, row by row; zeros for experts that have not run here."""
        parts: list[Array] = []
        for expert, count in enumerate(self.counts):
            ran = self._outputs.get(expert, {})
            parts += [ran[start] for start in sorted(ran)]
            if count and not ran:
                parts.append(zeros(count, self.x_nD.shape[1], self.x_nD.dtype))
        return mx.concatenate(parts)


def rows_of_one(count: int, index: int, *, many: bool) -> Rows:
    """Rows of one expert, which is at that index of its stack."""
    return Rows(_alike(count, index), [0] * index + [count], many)


def zeros(count: int, width: int, dtype: mx.Dtype) -> Array:
    """Zeros (count, width); a single row is made once."""
    return _zero_row(width, dtype) if count == 1 else mx.zeros((count, width), dtype)


@lru_cache
def _zero_row(width: int, dtype: mx.Dtype) -> Array:
    row = mx.zeros((1, width), dtype)
    mx.eval(row)
    return row


@lru_cache(maxsize=1024)
def _alike(count: int, index: int) -> Array:
    return mx.array([index] * count, dtype=mx.uint32)

"""The input and output rows of the experts of a layer on MLX."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from moesched.models.footprint import EXPERT_TILE

from ..kernels.mlx_functions import MANY_ROWS, Array, Rows, group_by_expert


class TiledRows(NamedTuple):
    """A range of an expert's rows, and the range of the whole tiles that contain these rows.

    A tile has EXPERT_TILE rows, or fewer at the end of the expert's rows. Tiles are computed whole, because the last
    bits of a row's result may depend on the other rows.

    Attributes:
        expert: number of the expert.
        rows, tiles: the two ranges, counted from the expert's first row.
    """

    expert: int
    rows: range
    tiles: range


class ExpertRows:
    """The rows of a micro-batch in one layer, sorted by expert: one for each pair of a token and one of its experts.

    Args:
        x_TD: the experts' input, one row for each token.
        experts_Tk: the experts of each token.
        weights_Tk: the router's weights of these experts.

    Attributes:
        x_nD: the input rows, sorted by expert.
        counts: number of rows of each expert, by the expert's number; empty until the host knows these numbers.
        many: whether there are at least `MANY_ROWS` (64) rows.
    """

    def __init__(self, x_TD: Array, experts_Tk: Array, weights_Tk: Array) -> None:
        self._x_TD = x_TD
        self.x_nD, self._experts_n, self._rows_Tk = group_by_expert(x_TD, experts_Tk)
        self._weights_Tk = weights_Tk
        self.counts: list[int] = []
        self.many = len(self.x_nD) >= MANY_ROWS
        self._outputs: dict[int, dict[int, Array]] = {}
        """The outputs of experts that ran: by expert, then by the first row of the range that the outputs are of."""

    def span(self, expert: int, start: int = 0, stop: int | None = None) -> TiledRows:
        """Select an expert's rows from `start` to before `stop`, counted from the expert's first row; by default all.

        stop: None for the end of the expert's rows.
        """
        rows = range(self.counts[expert])[start:stop]
        first = rows.start // EXPERT_TILE * EXPERT_TILE
        last = min(self.counts[expert], -(-rows.stop // EXPERT_TILE) * EXPERT_TILE)
        return TiledRows(expert, rows, range(first, last))

    def tiles(self, span: TiledRows) -> Array:
        """Return the input rows (rows, D) of the tiles of a span."""
        if self._rows_Tk is None:
            return self._x_TD
        first = sum(self.counts[: span.expert])
        return self.x_nD[first + span.tiles.start : first + span.tiles.stop]

    def keep(self, span: TiledRows, y_nD: Array) -> Array:
        """Store the outputs of a span's rows for the method `outputs`, and return them.

        y_nD: the outputs of all rows in the span's tiles.
        """
        if len(y_nD) > len(span.rows):
            start, stop = (each - span.tiles.start for each in (span.rows.start, span.rows.stop))
            y_nD = mx.contiguous(y_nD[start:stop])  # a copy: the tiles can be freed
        self._outputs.setdefault(span.expert, {})[span.rows.start] = y_nD
        return y_nD

    def arrays(self) -> list[Array]:
        """Return the lazy arrays that later kernels read, so that the caller can evaluate them."""
        index = [] if self._rows_Tk is None else [self._rows_Tk]
        return [self.x_nD, self._weights_Tk, self._experts_n, *index]

    def outputs(self) -> tuple[Array, Array | None, Array]:
        """Return the outputs of all rows, and for each token the indices and weights of the rows to sum up.

        Returns:
            the outputs (rows, hidden size), sorted by expert, with zeros for experts that did not run; the index of the
                row of each token's k experts (tokens, k), or None for a single token, whose rows are in the order of
                its experts; the router's weights of these experts (tokens, k).
        """
        parts: list[Array] = []
        for expert, count in enumerate(self.counts):
            ran = self._outputs.get(expert, {})
            parts += [ran[start] for start in sorted(ran)]
            if count and not ran:
                parts.append(zeros(count, self.x_nD.shape[1], self.x_nD.dtype))
        return mx.concatenate(parts), self._rows_Tk, self._weights_Tk


def rows_of_one(count: int, index: int, *, many: bool) -> Rows:
    """Describe rows of a single expert, for the kernels of the operation "experts".

    Args:
        count: number of rows.
        index: the expert's index in the stack of experts that the kernel gets.
        many: whether the micro-batch has at least `MANY_ROWS` (64) rows.
    """
    return Rows(_alike(count, index), [0] * index + [count], many)


def zeros(count: int, width: int, dtype: mx.Dtype) -> Array:
    """Return zeros (count, width) of a dtype; a single row of zeros is made once and shared."""
    return _zero_row(width, dtype) if count == 1 else mx.zeros((count, width), dtype)


@lru_cache
def _zero_row(width: int, dtype: mx.Dtype) -> Array:
    row = mx.zeros((1, width), dtype)
    mx.eval(row)
    return row


@lru_cache(maxsize=1024)
def _alike(count: int, index: int) -> Array:
    return mx.array([index] * count, dtype=mx.uint32)

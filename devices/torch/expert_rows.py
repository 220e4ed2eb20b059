"""The rows that the experts of a layer read and write."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import torch

from ..kernels.functions import Grouping
from ..products.linear import Tensor
from .exchange_rows import RoutedRows
from .expert_parts import Part


class HostRows:
    """The input and output rows of experts on the host.

    Attributes:
        y_nD: the output rows.
    """

    def __init__(self, exchanged: RoutedRows) -> None:
        self._exchanged = exchanged
        self.y_nD = exchanged.y_nD

    @cached_property
    def x_nD(self) -> Tensor:
        """The input rows, gathered when first used."""
        rows = self._exchanged
        return torch.index_select(rows.x_TD, 0, rows.tokens_n, out=rows.x_nD)


class ExpertRows:
    """The rows of a micro-batch in one layer, sorted by expert.

    Args:
        x_TD: the experts' input.
        grouping: the rows of each expert.
        weights_Tk: weights of each token's experts.

    Attributes:
        x_nD, y_nD: the experts' input and output rows.
        on_host: rows of experts on the host; None if none were copied there.
    """

    def __init__(self, x_TD: Tensor, grouping: Grouping, weights_Tk: Tensor) -> None:
        self.x_nD = x_TD.index_select(0, grouping.tokens_n)
        self.y_nD = torch.empty_like(self.x_nD)
        self.grouping = grouping
        self.weights_Tk = weights_Tk
        self.on_host: HostRows | None = None
        self._starts = list(accumulate(grouping.counts, initial=0))

    def outputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """The experts' outputs, the row of each token's choices, and their weights."""
        return self.y_nD, self.grouping.rows_Tk, self.weights_Tk

    def of(self, expert: int) -> range:
        """The range of an expert's rows."""
        return range(self._starts[expert], self._starts[expert + 1])

    def part(self, expert: int, start: int = 0, stop: int | None = None) -> Part:
        """Some of an expert's rows, counted from the expert's first; by default all of them."""
        rows = self.of(expert)
        return Part(self.x_nD, self.y_nD, rows, rows[start:stop])

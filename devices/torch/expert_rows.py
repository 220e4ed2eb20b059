"""The rows that the experts of a layer read and write."""

from __future__ import annotations

from itertools import accumulate

import torch

from ..products.linear import Tensor
from .expert_parts import Part
from .kernels import Grouping


class HostRows:
    """The rows that experts on the host read, and their outputs.

    x_TD: hidden states. tokens_n: each row's token.
    """

    def __init__(self, x_TD: Tensor, tokens_n: Tensor) -> None:
        self._x_TD = x_TD
        self._tokens_n = tokens_n
        self._rows: tuple[Tensor, Tensor] | None = None

    def rows(self, *, pinned: bool) -> tuple[Tensor, Tensor]:
        """The experts' input rows x_nD and output rows y_nD; the first call allocates both."""
        if self._rows is None:
            x_nD = self._x_TD.index_select(0, self._tokens_n)
            self._rows = x_nD, torch.empty(x_nD.shape, dtype=x_nD.dtype, pin_memory=pinned)
        return self._rows


class ExpertRows:
    """The rows of a micro-batch in one layer, those of each expert together.

    Args:
        x_TD: the experts' input.
        grouping: the rows of each expert.
        weights_Tk: weights of each token's experts.

    Attributes:
        x_nD, y_nD: the experts' input and output rows.
        on_host: the same for experts on the host; None while there are none.
    """

    def __init__(self, x_TD: Tensor, grouping: Grouping, weights_Tk: Tensor) -> None:
        self.x_nD = x_TD.index_select(0, grouping.tokens_n)
        self.y_nD = torch.empty_like(self.x_nD)
        self.grouping = grouping
        self.weights_Tk = weights_Tk
        self.on_host: HostRows | None = None
        self._starts = list(accumulate(grouping.counts, initial=0))

    def of(self, expert: int) -> range:
        """The range of an expert's rows."""
        return range(self._starts[expert], self._starts[expert + 1])

    def part(self, expert: int, start: int = 0, stop: int | None = None) -> Part:
        """Some of an expert's rows, counted from its first; by default all of them."""
        rows = self.of(expert)
        return Part(self.x_nD, self.y_nD, rows, rows[start:stop])

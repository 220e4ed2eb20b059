"""The rows that the experts of a layer read and write."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch

from moesched.models.networks import FeedForward

from ..kernels.expert_functions import sorted_by_expert
from ..products.linear import Tensor
from .exchange_rows import RoutedRows
from .expert_parts import Part


class HostRows:
    """The input and output rows of a micro-batch's experts on the host.

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
        experts_Tk, weights_Tk: the experts of each token, and their weights.
        network: the layer's description; the outputs of its shared expert, if it has one, follow those of the experts.

    Attributes:
        order: the token of each row, and the row of each pair of token and expert.
        x_nD, y_nD: the experts' input and output rows.
        shared: the rows of the shared expert; None if there is none.
        on_host: the rows on the host; None if none were copied there.
    """

    def __init__(self, x_TD: Tensor, experts_Tk: Tensor, weights_Tk: Tensor, network: FeedForward) -> None:
        self.order = sorted_by_expert(experts_Tk)
        self.x_nD = x_TD.index_select(0, self.order.tokens_n)
        rows, tokens = len(self.x_nD), len(x_TD) if network.shared else 0
        self._outputs = x_TD.new_empty(rows + tokens, x_TD.shape[1])
        self.y_nD = self._outputs[:rows]
        self.shared = (
            Part(x_TD, self._outputs[rows:], range(tokens), range(tokens)) if network.shared else None
        )
        self.weights_Tk = weights_Tk
        self._shared_scale = network.shared_scale
        self.on_host: HostRows | None = None
        self._rows: dict[int, range] = {}

    def outputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """All output rows (n, D), the row of each token's experts and their weights, both (T, k).

        A shared expert counts as a further expert of every token, the last one.
        """
        rows_Tk, weights_Tk = self.order.rows_Tk, self.weights_Tk
        if self.shared is not None:
            first, last = len(self.y_nD), len(self._outputs)
            own_T1 = torch.arange(first, last, device=rows_Tk.device)[:, None]
            rows_Tk = torch.cat([rows_Tk, own_T1], dim=1)
            scale_T1 = weights_Tk.new_full((len(own_T1), 1), self._shared_scale)
            weights_Tk = torch.cat([weights_Tk, scale_T1], dim=1)
        return self._outputs, rows_Tk, weights_Tk

    def count(self, counts: Mapping[int, int]) -> None:
        """Set the number of rows of each expert that has any, in ascending order, once the host knows it."""
        start = 0
        for expert, rows in counts.items():
            self._rows[expert] = range(start, start + rows)
            start += rows

    def of(self, expert: int) -> range:
        """The range of an expert's rows."""
        return self._rows.get(expert, range(0))

    def part(self, expert: int, start: int = 0, stop: int | None = None) -> Part:
        """Some of an expert's rows, counted from the expert's first; by default all of them."""
        rows = self.of(expert)
        return Part(self.x_nD, self.y_nD, rows, rows[start:stop])

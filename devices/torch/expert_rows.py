"""The input and output rows of a layer's experts on torch: one for each pair of a token and one of its experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch

from moesched.models.networks import FeedForward

from ..kernels.expert_functions import sorted_by_expert
from ..kernels.seam import RouterOutput
from ..products.linear import Tensor
from .exchange_rows import RoutedRows
from .expert_parts import ExpertPart


class HostRows:
    """The rows of a micro-batch's experts on the host, input and output: one for each pair of a token and an expert.

    Args:
        exchanged: memory for the rows, which has the experts' input of each token and the index of each row's token.

    Attributes:
        y_nD: the n output rows of all experts together.
    """

    def __init__(self, exchanged: RoutedRows) -> None:
        self._exchanged = exchanged
        self.y_nD = exchanged.y_nD

    @cached_property
    def x_nD(self) -> Tensor:
        """The input rows of all experts, copied from the tokens' rows when this is first read."""
        rows = self._exchanged
        return torch.index_select(rows.x_TD, 0, rows.tokens_n, out=rows.x_nD)


class ExpertRows:
    """The rows of a micro-batch in one layer, sorted by expert: one for each pair of a token and one of its experts.

    Args:
        routed: the router's result: the experts' input, and the experts of each token with their weights.
        network: the layer's description. If it has a shared expert, the shared expert's outputs follow all others.

    Attributes:
        order: has `tokens_n`, for each row the index of its token; and `rows_Tk`, for each token the indices of its k
            rows, one for each of its experts.
        x_nD, y_nD: the input and output rows of the experts that the router chose.
        shared: the rows of the shared expert; None if there is none.
        on_host: the rows in the host's memory; None if none were copied there.
    """

    def __init__(self, routed: RouterOutput, network: FeedForward) -> None:
        x_TD: Tensor = routed.x_TD
        self.order = routed.order or sorted_by_expert(routed.experts_Tk)
        self.x_nD = x_TD.index_select(0, self.order.tokens_n)
        rows, tokens = len(self.x_nD), len(x_TD) if network.shared else 0
        self._outputs = x_TD.new_empty(rows + tokens, x_TD.shape[1])
        self.y_nD = self._outputs[:rows]
        self.shared = (
            ExpertPart(x_TD, self._outputs[rows:], range(tokens), range(tokens)) if network.shared else None
        )
        self.weights_Tk: Tensor = routed.weights_Tk
        self._shared_scale = network.shared_scale
        self.on_host: HostRows | None = None
        self._rows: dict[int, range] = {}

    def outputs(self, *, shared: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output rows of all experts, and for each token the indices of its rows and its experts' weights.

        A shared expert counts as one more expert of every token, the last one.

        Args:
            shared: False to leave the shared expert out.

        Returns:
            three tensors: the output rows of all experts (rows, hidden size); for each token, the index of the row of
            each of its k experts (tokens, k); and the weights of each token's experts (tokens, k).
        """
        rows_Tk, weights_Tk = self.order.rows_Tk, self.weights_Tk
        if shared and self.shared is not None:
            first, last = len(self.y_nD), len(self._outputs)
            own_T1 = torch.arange(first, last, device=rows_Tk.device)[:, None]
            rows_Tk = torch.cat([rows_Tk, own_T1], dim=1)
            scale_T1 = weights_Tk.new_full((len(own_T1), 1), self._shared_scale)
            weights_Tk = torch.cat([weights_Tk, scale_T1], dim=1)
        return self._outputs, rows_Tk, weights_Tk

    def count(self, counts: Mapping[int, int]) -> None:
        """Set the number of rows of each expert; called as soon as the host knows the numbers.

        counts: number of rows by expert, in ascending order of experts; experts without rows are left out.
        """
        start = 0
        for expert, rows in counts.items():
            self._rows[expert] = range(start, start + rows)
            start += rows

    def of(self, expert: int) -> range:
        """Return the range of an expert's rows in `x_nD` and `y_nD`, empty for an expert without rows."""
        return self._rows.get(expert, range(0))

    def part(self, expert: int, start: int = 0, stop: int | None = None) -> ExpertPart:
        """Select an expert's rows from `start` to before `stop`, counted from the expert's first row; by default all.

        stop: None for the end of the expert's rows.
        """
        rows = self.of(expert)
        return ExpertPart(self.x_nD, self.y_nD, rows, rows[start:stop])

"""Counts the experts that tokens choose in a layer, by the experts that they chose some layers earlier."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from moesched.routing.trace import RoutingTrace


class TransitionCounts:
    """For pairs of layers, the number of tokens that chose expert a in one layer and expert b `distance` layers later.

    Args:
        layers: number of layers of the model.
        experts: number of experts in a layer.
        distance: number of layers from the earlier to the later layer of a pair.
    """

    def __init__(self, layers: int, experts: int, distance: int) -> None:
        self._distance = distance
        self._counts_LEE = np.zeros((max(0, layers - distance), experts, experts))

    def add_trace(self, trace: RoutingTrace) -> None:
        """Add the pairs of experts that all tokens of a trace chose."""
        for layer, counts_EE in enumerate(self._counts_LEE):
            earlier_Tk, later_Tk = trace.chosen[:, layer], trace.chosen[:, layer + self._distance]
            np.add.at(counts_EE, (earlier_Tk[:, :, None], later_Tk[:, None, :]), 1)

    def add(self, layer: int, earlier: Mapping[int, int], later: Mapping[int, int]) -> None:
        """Add an estimate of the pairs in a micro-batch, of which only the number of tokens by expert is known.

        Each token of an expert in `layer` is divided among the later layer's experts, in proportion to their tokens.

        Args:
            layer: number of the earlier layer.
            earlier: number of tokens by expert id in `layer`.
            later: number of tokens by expert id `distance` layers later.
        """
        weight = np.fromiter(later.values(), float) / max(1, sum(later.values()))
        more = np.multiply.outer(np.fromiter(earlier.values(), float), weight)
        self._counts_LEE[layer][np.ix_(list(earlier), list(later))] += more

    def expected(self, layer: int, chosen: Mapping[int, int]) -> npt.NDArray[np.float64]:
        """Return the expected number of tokens of each expert (experts,) in the layer `distance` layers after `layer`.

        All numbers are 0 if no pair with one of the chosen experts was counted.

        chosen: number of tokens by expert id in `layer`.
        """
        rows = self._counts_LEE[layer][list(chosen)]
        totals = rows.sum(axis=1)
        weights = np.fromiter(chosen.values(), float) / np.where(totals > 0, totals, 1)
        expected_E: npt.NDArray[np.float64] = weights @ rows
        return expected_E

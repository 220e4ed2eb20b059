"""Transitions between layers: which experts tokens choose in a layer, given those that they chose in an earlier one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from moesched.routing.trace import RoutingTrace


class TransitionCounts:
    """Counts of pairs of experts that tokens chose in a layer and in the one that is `distance` layers later."""

    def __init__(self, layers: int, experts: int, distance: int) -> None:
        self._distance = distance
        self._counts_LEE = np.zeros((max(0, layers - distance), experts, experts))

    def add_trace(self, trace: RoutingTrace) -> None:
        """Count the choices of all tokens of a trace."""
        for layer, counts_EE in enumerate(self._counts_LEE):
            earlier_Tk, later_Tk = trace.chosen[:, layer], trace.chosen[:, layer + self._distance]
            np.add.at(counts_EE, (earlier_Tk[:, :, None], later_Tk[:, None, :]), 1)

    def add(self, layer: int, earlier: Mapping[int, int], later: Mapping[int, int]) -> None:
        """Count the choices of a micro-batch, whose single tokens are not known.

        So each token of an expert in `layer` counts for all experts that are chosen `distance` layers later, by their
        shares.

        earlier, later: number of tokens by expert, in `layer` and `distance` layers later.
        """
        weight = np.fromiter(later.values(), float) / max(1, sum(later.values()))
        more = np.multiply.outer(np.fromiter(earlier.values(), float), weight)
        self._counts_LEE[layer][np.ix_(list(earlier), list(later))] += more

    def expected(self, layer: int, chosen: Mapping[int, int]) -> npt.NDArray[np.float64]:
        """Return the expected number of tokens (E,) of each expert `distance` layers after `layer`.

        They are all 0 if none of the chosen experts was counted.

        chosen: number of tokens by expert in `layer`.
        """
        rows = self._counts_LEE[layer][list(chosen)]
        totals = rows.sum(axis=1)
        weights = np.fromiter(chosen.values(), float) / np.where(totals > 0, totals, 1)
        expected_E: npt.NDArray[np.float64] = weights @ rows
        return expected_E

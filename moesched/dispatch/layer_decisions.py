"""Decisions for whole layers, remembered: with few tokens, layers often pose the same problem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from moesched.dispatch.expert_latencies import ExpertLatencies
from moesched.dispatch.layer_makespan import Layer, LayerCosts, LayerDecision, decide

REMEMBERED = 4096


class LayerDecisions:
    """Decides which experts of a layer move, so that the layer ends first.

    Args:
        on_host: whether the host can run experts that are not on the accelerator; otherwise all of these are fetched.
        resident_on_host: whether it can also run those that are.
    """

    def __init__(self, latencies: ExpertLatencies, *, on_host: bool, resident_on_host: bool = False) -> None:
        self._latencies = latencies
        self._on_host = on_host
        self._resident_on_host = resident_on_host
        self._remembered = lru_cache(REMEMBERED)(self._decide)

    def of(self, resident: Sequence[int], missing: Sequence[int], micro_batches: int = 1) -> LayerDecision:
        """Decide by the tokens of the resident experts, ascending, and of the missing ones, descending.

        micro_batches: number of micro-batches over which each expert's tokens are spread.
        """
        return self._remembered(tuple(resident), tuple(missing), micro_batches)

    def _decide(
        self, resident: tuple[int, ...], missing: tuple[int, ...], micro_batches: int
    ) -> LayerDecision:
        costs: LayerCosts = self._latencies
        if micro_batches > 1:
            costs = _InParts(self._latencies, micro_batches)
        layer = Layer(resident, missing, costs, resident_on_host=self._resident_on_host)
        if self._on_host and (missing or self._resident_on_host):
            return decide(layer)
        seconds = layer.end(0.0, sum(layer.resident_here), layer.missing_here, 0)
        return LayerDecision((), tuple(range(len(missing))), seconds)


class _InParts:
    """Costs of experts whose tokens are split evenly over several micro-batches: one kernel and one copy for each."""

    def __init__(self, latencies: ExpertLatencies, parts: int) -> None:
        self._latencies = latencies
        self._parts = parts
        self.transfer = latencies.transfer

    def at_host(self, tokens: int) -> float:
        return self._of_all(self._latencies.at_host, tokens)

    def at_accelerator(self, tokens: int) -> float:
        return self._of_all(self._latencies.at_accelerator, tokens)

    def to_host(self, tokens: int) -> float:
        return self._of_all(self._latencies.to_host, tokens)

    def from_host(self, rows: int) -> float:
        return self._of_all(self._latencies.from_host, rows)

    def side_by_side(self, tokens: int) -> tuple[float, float]:
        return self._latencies.side_by_side(-(-tokens // self._parts))

    def _of_all(self, latency: Callable[[int], float], tokens: int) -> float:
        parts = max(1, min(self._parts, tokens))
        return parts * latency(-(-tokens // parts))

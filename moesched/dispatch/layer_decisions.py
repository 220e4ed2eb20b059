"""Divides a layer's experts between host and accelerator.

Divisions are cached, since layers often have the same numbers of tokens per expert.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from moesched.dispatch.expert_latencies import ExpertLatencies
from moesched.dispatch.expert_placement import Routed, tokens_of, users_of
from moesched.dispatch.layer_makespan import ChosenExperts, LayerCosts, LayerDecision, decide

REMEMBERED = 4096
Parts = tuple[int, ...]
"""The number of an expert's tokens in each micro-batch that chose the expert, ascending."""
Load = Any
"""The number of an expert's tokens if there is one micro-batch, else `Parts`."""


class Division(NamedTuple):
    """The chosen experts of a layer, by the place where each runs with all of its tokens.

    Attributes:
        stay: experts that are on the accelerator and run there, those with few tokens first.
        fetched: experts that are fetched to the accelerator, and run there in this order.
        on_host: experts that run on the host, those with many tokens first.
        seconds: time from the end of routing until the last output is on the accelerator.
    """

    stay: list[int]
    fetched: list[int]
    on_host: list[int]
    seconds: float


class LayerDecisions:
    """Divides the experts of a layer between host and accelerator so that the layer ends as early as possible.

    Args:
        latencies: seconds that an expert takes on each processor, and that moving its weights takes.
        on_host: whether the host can run experts that are not on the accelerator; otherwise these are all fetched.
        resident_on_host: whether the host can also run experts that are on the accelerator.

    Attributes:
        transfer: seconds to move one expert to the accelerator.
    """

    def __init__(self, latencies: ExpertLatencies, *, on_host: bool, resident_on_host: bool = False) -> None:
        self._latencies = latencies
        self.transfer = latencies.transfer
        self._on_host = on_host
        self._resident_on_host = resident_on_host
        self._remembered = lru_cache(REMEMBERED)(self._decide)

    def divide(self, routed: Routed, here: Collection[int]) -> Division:
        """Divide the experts that a group of micro-batches chose between host and accelerator.

        Args:
            routed: for each micro-batch, the number of its tokens that chose each expert.
            here: the layer's experts that are on the accelerator.
        """
        loads: Mapping[int, Load] = tokens_of(routed)
        sizes: Mapping[int, Any] = loads
        if len(routed) > 1:
            loads = {
                expert: tuple(sorted([routed[j][expert] for j in users]))
                for expert, users in users_of(routed).items()
            }
            sizes = {
                expert: (sum(map(self._latencies.at_host, parts)), sum(parts))
                for expert, parts in loads.items()
            }
        size, chosen = sizes.__getitem__, sorted(loads)
        resident = sorted([expert for expert in chosen if expert in here], key=size)
        missing = sorted([expert for expert in chosen if expert not in here], key=size, reverse=True)
        of_resident, of_missing = (tuple(map(loads.__getitem__, each)) for each in (resident, missing))
        choice = self._remembered(of_resident, of_missing, len(routed))
        fetched = [missing[place] for place in choice.fetched]
        away = [resident[place] for place in choice.away]
        moved = {*fetched, *away}
        left = [expert for expert in missing if expert not in moved]
        return Division(
            [expert for expert in resident if expert not in moved],
            fetched,
            sorted(left + away, key=size, reverse=True),
            choice.seconds,
        )

    def _decide(self, resident: Sequence[Load], missing: Sequence[Load], micro_batches: int) -> LayerDecision:
        costs: LayerCosts = self._latencies
        if micro_batches > 1:
            costs = _InParts(self._latencies, micro_batches)
            resident, missing = (list(map(_Tokens, each)) for each in (resident, missing))
        layer = ChosenExperts(resident, missing, costs, resident_on_host=self._resident_on_host)
        if self._on_host and (missing or self._resident_on_host):
            return decide(layer)
        seconds = layer.end(0.0, sum(layer.resident_here), layer.missing_here, 0)
        return LayerDecision((), tuple(range(len(missing))), seconds)


class _Tokens(int):
    """The number of an expert's tokens in all micro-batches, with the numbers for each micro-batch as `parts`."""

    parts: Parts

    def __new__(cls, parts: Parts) -> _Tokens:
        tokens = super().__new__(cls, sum(parts))
        tokens.parts = parts
        return tokens


class _InParts:
    """Latencies of an expert whose tokens belong to several micro-batches.

    The tokens of each micro-batch run in a kernel of their own. Hidden states and outputs are copied once per
    micro-batch, and their rows are assumed to be divided equally among these copies.
    """

    def __init__(self, latencies: ExpertLatencies, micro_batches: int) -> None:
        self._latencies = latencies
        self._micro_batches = micro_batches
        self.transfer = latencies.transfer

    def at_host(self, tokens: int) -> float:
        return self._of_parts(self._latencies.at_host, tokens)

    def at_accelerator(self, tokens: int) -> float:
        return self._of_parts(self._latencies.at_accelerator, tokens)

    def to_host(self, tokens: int) -> float:
        return self._copied(self._latencies.to_host, tokens)

    def from_host(self, rows: int) -> float:
        return self._copied(self._latencies.from_host, rows)

    def side_by_side(self, tokens: int) -> tuple[float, float]:
        return self._latencies.side_by_side(-(-tokens // self._micro_batches))

    def _of_parts(self, latency: Callable[[int], float], tokens: int) -> float:
        assert isinstance(tokens, _Tokens), "experts come with the tokens of each micro-batch"
        return sum(map(latency, tokens.parts))

    def _copied(self, latency: Callable[[int], float], rows: int) -> float:
        parts = max(1, min(self._micro_batches, rows))
        return parts * latency(-(-rows // parts))

"""Observers of a model on a device: of its routers' choices, of its experts' activations."""

from __future__ import annotations

from collections.abc import Iterable

from moesched.models.footprint import EXPERT_TILE
from moesched.seams import ActivationObserver, RoutingObserver, TokenSpan

from ..products.linear import Tensor, gated
from .expert_rows import ExpertRows
from .micro_batch import MicroBatchState
from .resident_pages import Weights


class DeviceObservers:
    """Reports to the observers, if there are any."""

    def __init__(self) -> None:
        self.routing: RoutingObserver | None = None
        self.activations: ActivationObserver | None = None

    def routed(self, layer: int, state: MicroBatchState, first_request: int, experts_Tk: Tensor) -> None:
        """Report a router's choices; `first_request` is the number of requests in the batches before."""
        if self.routing is None:
            return
        step = state.step
        spans = [
            TokenSpan(first_request + request, past, new)
            for request, past, new in zip(state.requests, step.past, step.new, strict=True)
        ]
        self.routing.routed(layer, spans, experts_Tk.cpu().numpy())

    def applied(self, layer: int, rows: ExpertRows, experts: Iterable[int], weights: Weights) -> None:
        """Report the activations of experts that are about to run; they are computed a second time for that."""
        if self.activations is None:
            return
        for expert in experts:
            span = rows.of(expert)
            for start in span[::EXPERT_TILE]:
                x_nD = rows.x_nD[start : min(start + EXPERT_TILE, span.stop)]
                values_nI = gated(x_nD, weights[f"experts.{expert}.gate"])
                self.activations.activated(layer, values_nI.float().cpu().numpy())

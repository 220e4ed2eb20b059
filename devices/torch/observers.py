"""Those who watch what a model does on a device: its routers' choices, its experts' activations."""

from __future__ import annotations

from collections.abc import Iterable

from moesched.models.footprint import EXPERT_TILE
from moesched.seams import ActivationObserver, RoutingObserver, TokenSpan

from ..products.linear import Tensor, gated
from .expert_rows import ExpertRows
from .micro_batch import MicroBatchState
from .resident_pages import Weights


class DeviceObservers:
    """Tells observers, where there are any."""

    def __init__(self) -> None:
        self.routing: RoutingObserver | None = None
        self.activations: ActivationObserver | None = None

    def routed(self, layer: int, state: MicroBatchState, first_request: int, experts_Tk: Tensor) -> None:
        """A layer's router chose; `first_request` is how many requests came in the batches before."""
        if self.routing is None:
            return
        step = state.step
        spans = [
            TokenSpan(first_request + request, past, new)
            for request, past, new in zip(state.requests, step.past, step.new, strict=True)
        ]
        self.routing.routed(layer, spans, experts_Tk.cpu().numpy())

    def applied(self, layer: int, rows: ExpertRows, experts: Iterable[int], weights: Weights) -> None:
        """Experts are about to run; what their SiLU lets through is computed once more for who watches."""
        if self.activations is None:
            return
        for expert in experts:
            span = rows.of(expert)
            for start in span[::EXPERT_TILE]:
                x_nD = rows.x_nD[start : min(start + EXPERT_TILE, span.stop)]
                values_nI = gated(x_nD, weights[f"experts.{expert}.gate"])
                self.activations.activated(layer, values_nI.float().cpu().numpy())

"""Observers of a model on a device: of its routers' choices, of its experts' activations."""

from __future__ import annotations

from collections.abc import Iterable

from moesched.seams import ActivationObserver, RoutingObserver, TokenSpan

from ..kernels.layer_weights import Weights
from ..products.linear import Tensor, gated
from .expert_parts import Part, tiles_of
from .micro_batch import MicroBatchState


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
        self.routing.routed(layer, spans, experts_Tk.cpu().numpy().copy())

    def applied(self, layer: int, parts: Iterable[Part], expert: int, weights: Weights) -> None:
        """Report the activations of an expert that is about to run; they are computed a second time for that."""
        if self.activations is None:
            return
        for part in parts:
            for tile, kept in tiles_of(part.rows, part.wanted):
                values_nI = gated(part.x_nD[tile], weights[f"experts.{expert}.gate"])
                if kept is not None:
                    values_nI = values_nI[kept]
                self.activations.activated(layer, values_nI.float().cpu().numpy())

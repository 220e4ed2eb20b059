"""Reports to observers of a model: the experts that routers choose, and the experts' activations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from moesched.seams import ActivationObserver, RoutingObserver, TokenSpan

from .micro_batch import MicroBatchState


class DeviceObservers:
    """Reports routers' choices and experts' activations to observers, if there are any.

    Attributes:
        routing: the observer of the experts that routers choose; None for none.
        activations: the observer of the experts' activations; None for none.
        first_request: index in the run of the batch's first request, which is the number of requests in earlier
            batches.
    """

    def __init__(self) -> None:
        self.routing: RoutingObserver | None = None
        self.activations: ActivationObserver | None = None
        self.first_request = 0

    def spans(self, state: MicroBatchState) -> list[TokenSpan]:
        """Return the requests and positions of the tokens in a micro-batch's step; empty if nobody observes routing."""
        if self.routing is None:
            return []
        step = state.step
        return [
            TokenSpan(self.first_request + request, past, new)
            for request, past, new in zip(state.requests, step.past, step.new, strict=True)
        ]

    def activated(self, layer: int, values: Iterable[npt.NDArray[np.float32]]) -> None:
        """Report activations of a layer's experts.

        values: arrays of activations (rows of an expert, inner size of the expert).
        """
        if self.activations is not None:
            for values_nI in values:
                self.activations.activated(layer, values_nI)

    def routed(self, layer: int, spans: Sequence[TokenSpan], experts_Tk: npt.NDArray[Any]) -> None:
        """Report the experts that a layer's router chose.

        Args:
            spans: the requests and positions of the tokens.
            experts_Tk: the k experts of each of T tokens.
        """
        if self.routing is not None:
            self.routing.routed(layer, spans, experts_Tk.astype(np.int64))

"""Observers: of the tasks that ran, of routers, and of the activations of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from moesched.tasks import Task


class Observer(Protocol):
    """Receives every task that ran."""

    def ended(self, task: Task) -> None:
        """Receive a task with its start, end, value and dependencies. Called from any thread, one call at a time."""


class TokenSpan(NamedTuple):
    """Consecutive tokens of one request.

    Attributes:
        request: the request's index among all requests of the run.
        first: the first token's position in the request.
        tokens: number of tokens.
    """

    request: int
    first: int
    tokens: int


class RoutingObserver(Protocol):
    """Receives the choices of a model's routers on a device."""

    def routed(self, layer: int, spans: Sequence[TokenSpan], experts_Tk: npt.NDArray[np.int64]) -> None:
        """Receive `experts_Tk`: for each of T tokens, the k experts that its router chose, in ascending order.

        The rows are the tokens of `spans`, in their order.
        Every token is reported once for each layer. Called from any thread, one call at a time.
        """


class ActivationObserver(Protocol):
    """Receives the experts' activations on a device."""

    def activated(self, layer: int, values_nI: npt.NDArray[np.float32]) -> None:
        """Receive `values_nI`: SiLU(gate x) of one of the layer's experts, for n of the tokens that were routed to it.

        I is the expert's inner size. The expert's number is not given, and its tokens may come in several calls.
        Called from any thread, possibly concurrently.
        """

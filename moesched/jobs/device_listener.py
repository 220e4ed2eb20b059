"""Listeners that let a device report its routing or activations to an observer."""

from __future__ import annotations

from moesched.errors import BadInput
from moesched.runs.listeners import Listener
from moesched.seams import ActivationObserver, Device, ObservesActivations, ObservesRouting, RoutingObserver


class RoutingListener(Listener):
    """Lets the device report the routers' choices to an observer."""

    def __init__(self, observer: RoutingObserver) -> None:
        self._observer = observer

    def opened(self, device: Device) -> None:
        """Have the device report its routing to the observer from the first batch on.

        Raises:
            BadInput: the device does not report its routing.
        """
        if not isinstance(device, ObservesRouting):
            raise _blind(device, "routing")
        device.observe_routing(self._observer)


class ActivationListener(Listener):
    """Lets the device report the experts' activations to an observer."""

    def __init__(self, observer: ActivationObserver) -> None:
        self._observer = observer

    def opened(self, device: Device) -> None:
        """Have the device report activations to the observer from the first batch on.

        Raises:
            BadInput: the device does not report activations.
        """
        if not isinstance(device, ObservesActivations):
            raise _blind(device, "activations")
        device.observe_activations(self._observer)


def _blind(device: Device, sight: str) -> BadInput:
    return BadInput(f"device {type(device).__name__} does not report its {sight}: use --device torch")

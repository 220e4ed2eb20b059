"""Runs that are watched from within: an observer is given to the device before the first batch."""

from __future__ import annotations

from typing import Any, Literal

from moesched.errors import BadInput
from moesched.runs.listeners import Listener


class DeviceListener(Listener):
    """Gives an observer to the device of a run.

    Args:
        what: what the observer is to be told of.
    """

    def __init__(self, what: Literal["routing", "activations"], observer: Any) -> None:
        self._what = what
        self._observer = observer

    def opened(self, device: Any) -> None:
        """Give it.

        Raises:
            BadInput: the device does not let itself be watched.
        """
        observe = getattr(device, f"observe_{self._what}", None)
        if observe is None:
            raise BadInput(
                f"device {type(device).__name__} tells nothing of its {self._what}: use --device torch"
            )
        observe(self._observer)

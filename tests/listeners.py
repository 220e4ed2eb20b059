"""A listener of runs that presses Ctrl-C."""

from __future__ import annotations

import os
import signal
import time
from typing import Literal

from moesched.runs.listeners import Listener
from moesched.steps.plan import Plan
from moesched.tasks import Task


class CtrlC(Listener):
    """Presses Ctrl-C once.

    Args:
        when: once the run is planned, when its first page is loaded, or at the token of this number.

    Attributes:
        pressed: the seconds of the processor until then.
    """

    def __init__(self, when: Literal["planned", "loading"] | int) -> None:
        self.pressed = 0.0
        self._when = when
        self._tokens = 0

    def planned(self, plan: Plan) -> None:
        self._reached("planned")

    def ended(self, task: Task) -> None:
        if task.verb == "load":
            self._reached("loading")

    def generated(self, request: int, token: int, text: str) -> None:
        self._tokens += 1
        self._reached(self._tokens)

    def _reached(self, place: str | int) -> None:
        if place == self._when and not self.pressed:
            self.pressed = time.process_time()
            os.kill(os.getpid(), signal.SIGINT)

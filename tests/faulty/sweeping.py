"""Policies that fail at some points of a sweep, each in another way."""
from __future__ import annotations

import os
import signal

from moesched.policies.resident import Resident


class DiesAtFour(Resident):
    """Its process is killed, as for lack of memory, where a batch has four requests."""

    def plan(self, plan):
        if len(plan.batch.prompts) == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        super().plan(plan)


class DiesOnce(Resident):
    """Its process is killed, unless a file is there, which it creates."""

    def __init__(self, mark: str = ""):
        super().__init__()
        self.mark = mark

    def plan(self, plan):
        if not os.path.exists(self.mark):
            open(self.mark, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        super().plan(plan)


class RaisesAtFour(Resident):
    """Prints, and raises where a batch has four requests."""

    def plan(self, plan):
        print("a policy prints")
        if len(plan.batch.prompts) == 4:
            raise ZeroDivisionError("four\udcff")
        super().plan(plan)


class NeverPlans(Resident):
    """Does not end."""

    def plan(self, plan):
        while True:
            pass

"""The interface of cost models, which estimate the demand of a task on a machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from moesched.work import Demand, Work


def at_once(classes: Iterable[str]) -> str:
    """Return one name for classes of work that run at once: the classes in alphabetical order, joined by " + "."""
    return " + ".join(sorted(classes))


class CostModel(Protocol):
    """Interface of a cost model, which estimates the time of work; equal work always has an equal estimate."""

    def work(self, work: Work) -> Demand:
        """Return the time that `work` takes alone on the machine, and the share of each resource that it uses then.

        Raises:
            BadInput: the model has no cost for this work; zero is never assumed.
        """

"""Defines the demand of a task on a machine, and the interface of cost models, which estimate it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from moesched.tasks import Work


class Demand(NamedTuple):
    """The time and the resources that one task needs on the machine.

    Attributes:
        seconds: the task's time alone on the machine.
        shares: pairs of a resource and the share of it, from 0 to 1, that the task uses while it runs; rounded to three
            decimals, so that similar tasks have equal shares.
        sort: sort of task, for which slowdowns were measured; empty if none were.
        slowed: pairs (sorts of the tasks beside this one, joined by `at_once`; this task's speed beside them, relative
            to alone).
        lead: the part of `seconds` that passes before the task starts, while it is handed to its lane's thread.
        fixed: the part of `seconds` that no faster processor or link would shorten: a launch or a latency.
    """

    seconds: float
    shares: tuple[tuple[str, float], ...]
    sort: str = ""
    slowed: tuple[tuple[str, float], ...] = ()
    lead: float = 0.0
    fixed: float = 0.0


def at_once(sorts: Iterable[str]) -> str:
    """Return the name of a set of sorts of task that run at once: the sorts in alphabetical order, joined by " + "."""
    return " + ".join(sorted(sorts))


class CostModel(Protocol):
    """Interface of a cost model, which estimates the time of work; equal work always has an equal estimate."""

    def work(self, work: Work) -> Demand:
        """Return the time of a work alone on the machine, and the share of each resource that the work uses meanwhile.

        Raises:
            BadInput: the model has no cost for this work; zero is never assumed.
        """

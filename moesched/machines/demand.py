"""The demand of a task on a machine, and the seam of what estimates it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from moesched.tasks import Work


class Demand(NamedTuple):
    """The demand of one task on the machine.

    Attributes:
        seconds: its time alone on the machine.
        shares: the share of each resource that it uses meanwhile, from 0 to 1; rounded to three decimals, so that
            similar tasks have equal shares.
        sort: the kind of task by which concurrent ones are slowed; empty where that was not measured.
        slowed: its speed beside tasks of other sorts, relative to being alone, as (`at_once` of the sorts, speed).
        lead: the part of `seconds` that passes before it starts, until its lane's thread has it.
        fixed: the part of `seconds` that no faster processor or link would shorten: a launch or a latency.
    """

    seconds: float
    shares: tuple[tuple[str, float], ...]
    sort: str = ""
    slowed: tuple[tuple[str, float], ...] = ()
    lead: float = 0.0
    fixed: float = 0.0


def at_once(sorts: Iterable[str]) -> str:
    """The canonical name of a set of concurrent sorts of task."""
    return " + ".join(sorted(sorts))


class CostModel(Protocol):
    """Estimates how long work takes. Pure and deterministic: equal work always costs the same."""

    def work(self, work: Work) -> Demand:
        """Return the time alone on the machine, and the share of each resource used meanwhile.

        Raises:
            BadInput: it has no cost for this work; it never assumes zero.
        """

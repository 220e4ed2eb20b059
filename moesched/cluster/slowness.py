"""Detects slow nodes: nodes that compute for longer than the others in several steps."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

SLOW_FACTOR = 2.0
STEPS_IN_A_ROW = 5
SHORTEST_SECONDS = 0.02
"""Seconds; shorter steps are not compared, since the system's own delays would dominate."""


class SlowNodes:
    """Compares, step by step, how long each node computed.

    Args:
        ranks: ranks of the nodes that take part.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = list(ranks)
        self._queues: dict[int, list[float]] = {rank: [] for rank in ranks}
        self._in_a_row = dict.fromkeys(ranks, 0)
        self._told: set[int] = set()

    def computed(self, rank: int, seconds: float) -> dict[int, float]:
        """Record the seconds that a node computed in its next step.

        Returns:
            The nodes found to be slow by this call: by rank, the node's time over the median time of the other nodes.
        """
        self._queues[rank].append(seconds)
        found: dict[int, float] = {}
        while all(self._queues.values()):
            found |= self._compare({each: queue.pop(0) for each, queue in self._queues.items()})
        return found

    def _compare(self, step: dict[int, float]) -> dict[int, float]:
        found = {}
        for rank, seconds in step.items():
            others = [each for other, each in step.items() if other != rank]
            factor = seconds / max(median(others), 1e-9) if others else 1.0
            slow = seconds >= SHORTEST_SECONDS and factor >= SLOW_FACTOR
            self._in_a_row[rank] = self._in_a_row[rank] + 1 if slow else 0
            if self._in_a_row[rank] >= STEPS_IN_A_ROW and rank not in self._told:
                self._told.add(rank)
                found[rank] = factor
        return found

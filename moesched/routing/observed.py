"""The expert choices of a run, kept while it runs, to route a simulation of the same plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moesched.routing.scores import ScoredTokens
from moesched.tasks import Task


class ObservedRouting:
    """An observer of a run, and afterwards a `Routing` with the choices of that run.

    Args:
        steps: number of steps whose choices are kept.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._chosen: dict[tuple[int, int, int], Mapping[int, int]] = {}
        self._rows: dict[int, set[int]] = {}

    def ended(self, task: Task) -> None:
        """Keep the choices of a `route` task."""
        if task.verb == "route" and task.generated < self._steps:
            self._chosen[task.generated, task.layer, task.micro_batch] = task.value
            if task.phase == "decode":
                self._rows.setdefault(task.micro_batch, set()).add(task.work.tokens)

    def rows_apart(self, rows: int) -> bool:
        """Test whether the run's micro-batches became smaller when sequences ended, as `KeepsRowsApart` asks."""
        return any(len(seen) > 1 for seen in self._rows.values())

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        """The number of tokens of each expert that got any in the run's micro-batch, step and layer."""
        return dict(self._chosen[step, layer, micro_batch])

    def scores(self, step: int, layer: int, micro_batch: int, tokens: int) -> Sequence[float]:
        """The router's scores of all experts in the run; only for plans that request scores."""
        value = self._chosen[step, layer, micro_batch]
        assert isinstance(value, ScoredTokens), "the device gives scores to such a plan"
        return value.scores

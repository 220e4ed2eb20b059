"""Recorder of a run's expert counts, from which a simulation of the same plan then takes its routing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moesched.routing.scores import ScoredTokens
from moesched.tasks import Task


class ObservedRouting:
    """Records the expert counts of a run's routers, and returns these counts as a `Routing` after the run.

    Args:
        steps: number of steps, from the first one on, whose counts are kept.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._chosen: dict[tuple[int, int, int], Mapping[int, int]] = {}
        self._rows: dict[int, set[int]] = {}

    def ended(self, task: Task) -> None:
        """Keep the expert counts of `route` and `post_attention` tasks in the first `steps` steps; ignore others."""
        if task.verb in ("route", "post_attention") and task.generated < self._steps:
            self._chosen[task.generated, task.layer, task.micro_batch] = task.value
            if task.phase == "decode":
                self._rows.setdefault(task.micro_batch, set()).add(task.work.tokens)

    def rows_apart(self, rows: int) -> bool:
        """Test whether the run left ended sequences out of its decode micro-batches; the simulation then does the same.

        The result is True if a micro-batch's number of rows changed between decode steps. `rows` is not used: the
        method stands in for `KeepsRowsApart.rows_apart` of a device, which takes this argument.
        """
        return any(len(seen) > 1 for seen in self._rows.values())

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        """Return the number of tokens that chose each expert in the run, by expert id; `tokens` is not used."""
        return dict(self._chosen[step, layer, micro_batch])

    def scores(self, step: int, layer: int, micro_batch: int, tokens: int) -> Sequence[float]:
        """Return the router's score of each expert in the run, by expert id; only if the plan requests scores."""
        value = self._chosen[step, layer, micro_batch]
        assert isinstance(value, ScoredTokens), "the device gives scores to such a plan"
        return value.scores

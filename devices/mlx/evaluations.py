"""When arrays are evaluated: where the host needs a value, or at the end of every task."""

from __future__ import annotations

from typing import Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from moesched.steps.views import View
from moesched.tasks import Task

from .kernels import Array

Evaluate = Literal["needed", "task"]

FEW_ROWS = 64
"""Results of more rows are evaluated at the end of their task: that takes long beside an evaluation, and intermediate
results of several tasks at once would take more memory than the plan reserves for one."""


class Evaluations:
    """Evaluates arrays on the device's thread, and counts how often.

    A task's results stay open until the host needs a value of the same micro-batch. Results are evaluated at once where
    their operands lie in slots, since the next page is read into these as soon as the task has ended.

    Args:
        evaluate: "needed", or "task" for all results at once.

    Attributes:
        count: evaluations so far.
    """

    def __init__(self, evaluate: Evaluate) -> None:
        self.count = 0
        self._each_task = evaluate == "task"
        self._open: dict[int, list[Array]] = {}
        """Results to be evaluated, by micro-batch."""

    def later(self, task: Task, rows: int, *arrays: Array, micro_batch: int | None = None) -> None:
        """Evaluate a task's results by the time that the host needs a value of their micro-batch.

        Args:
            rows: of the results.
            micro_batch: theirs, if it is not the task's.
        """
        number = task.micro_batch if micro_batch is None else micro_batch
        if self._each_task or rows > FEW_ROWS or _streams(task):
            self.now(number, *arrays)
        else:
            self._open.setdefault(number, []).extend(arrays)

    def now(self, micro_batch: int, *arrays: Array) -> None:
        """Evaluate arrays, and all open results of their micro-batch."""
        self.count += 1
        mx.eval(arrays, self._open.pop(micro_batch, ()))

    def on_host(self, micro_batch: int, array: Array) -> npt.NDArray[np.float32]:
        """Evaluate a float32 array, with all open results of its micro-batch, and copy it to the host."""
        self.now(micro_batch, array)
        return np.array(array)

    def close_others(self, micro_batch: int) -> None:
        """Evaluate the open results of all other micro-batches: they may read a KV cache that is to be written."""
        for other in [each for each in self._open if each != micro_batch]:
            self.now(other)


def _streams(task: Task) -> bool:
    """Whether a task reads slots that are given to other pages."""
    return isinstance(task.operands, View) and bool(task.operands.moving)

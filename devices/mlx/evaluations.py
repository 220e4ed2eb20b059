"""Evaluation of arrays: where the host needs a value, or at the end of every task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from moesched.steps.plan import Plan
from moesched.steps.views import View
from moesched.tasks import Task

from ..kernels.mlx_functions import Array

Evaluate = Literal["needed", "task"]

FEW_TOKENS = 64
"""Tasks of more tokens are evaluated one by one: each takes long beside an evaluation, and their intermediate results
at once would take more memory than the plan reserves."""


class Evaluations:
    """Evaluates the arrays of one batch on the device's thread.

    A deferred task's results are evaluated when the host needs a value of the same micro-batch. A task that reads slots
    is never deferred, since the next page is read into these as soon as it has ended.

    Args:
        evaluate: "needed", or "task" for no deferred tasks.

    Attributes:
        count: evaluations so far.
    """

    computing = nullcontext

    def __init__(self, plan: Plan, evaluate: Evaluate) -> None:
        self.count = 0
        self._defers = evaluate == "needed"
        self._decoded = dict(enumerate(map(len, plan.batch.micro_batches)))
        self._prefilled = {number: sum(chunk.tokens) for number, chunk in plan.chunks.items()}
        self._open: dict[int, list[Array]] = {}
        """Results of deferred tasks, by micro-batch."""

    def defers(self, task: Task) -> bool:
        """True if a task's results may be evaluated after the task's end; callable from any thread."""
        if not self._defers or (isinstance(task.operands, View) and task.operands.moving):
            return False
        return _tokens(task, self._decoded if task.phase == "decode" else self._prefilled) <= FEW_TOKENS

    def later(self, task: Task, *arrays: Array, micro_batch: int | None = None) -> None:
        """Evaluate a task's results now, or later if the task is deferred.

        Args:
            micro_batch: the results' micro-batch, if it is not the task's.
        """
        number = task.micro_batch if micro_batch is None else micro_batch
        if self.defers(task):
            self._open.setdefault(number, []).extend(arrays)
        else:
            self.settle(number, *arrays)

    def settle(self, micro_batch: int, *arrays: Array) -> None:
        """Evaluate arrays, and all deferred results of their micro-batch."""
        self.count += 1
        mx.eval(arrays, self._open.pop(micro_batch, ()))

    def on_host(self, array: Array) -> npt.NDArray[Any]:
        """Copy an evaluated array to numpy."""
        return np.array(array)

    def value(
        self, task: Task, read: Callable[..., Any], *arrays: Array, beside: Sequence[Array] = ()
    ) -> Any:
        """The value of a task, which `read` makes of arrays on the host; `beside` are evaluated at the same time."""
        self.settle(task.micro_batch, *arrays, *beside)
        return read(*map(self.on_host, arrays))

    def settled(self, value: Any) -> Any:
        """The value itself."""
        return value

    def close_others(self, micro_batch: int) -> None:
        """Evaluate all deferred results of other micro-batches, which may read a KV cache that is about to be written.

        MLX would copy the cache for the writer.
        """
        for other in [each for each in self._open if each != micro_batch]:
            self.settle(other)


def _tokens(task: Task, tokens: Mapping[int, int]) -> int:
    """The number of tokens of a task's micro-batches together."""
    if not task.ranges:
        return tokens[task.micro_batch]
    return sum(tokens[micro_batch] for micro_batch, _, _ in task.ranges)

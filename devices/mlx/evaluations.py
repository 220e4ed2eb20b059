"""The evaluation of MLX's lazy arrays: when the host needs a value, or at the end of every task."""

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
"""Largest number of tokens of a deferred task: a task whose results are evaluated after its end.

A task of more tokens is evaluated before it ends. It takes long compared with the cost of an evaluation, and the
intermediate results of several such tasks would take more memory than the plan reserves.
"""


class Evaluations:
    """Evaluates the lazy arrays of one batch, on the device's thread: MLX's implementation of the runner's `Library`.

    The results of a deferred task are evaluated when the host needs a value of the same micro-batch. A task whose
    weights are in streamed slots is never deferred, since other pages may be read into these slots as soon as the task
    has ended.

    Args:
        evaluate: "needed" to defer tasks where possible, "task" to defer none.

    Attributes:
        count: number of evaluations so far.
    """

    computing = nullcontext

    def __init__(self, plan: Plan, evaluate: Evaluate) -> None:
        self.count = 0
        self._defers = evaluate == "needed"
        self._decoded = dict(enumerate(map(len, plan.batch.micro_batches)))
        self._prefilled = {number: sum(chunk.tokens) for number, chunk in plan.chunks.items()}
        self._open: dict[int, list[Array]] = {}
        """The results of deferred tasks that are not evaluated yet, by micro-batch."""

    def defers(self, task: Task) -> bool:
        """Test whether a task's results may be evaluated after the task's end; any thread may call this."""
        if not self._defers or (isinstance(task.operands, View) and task.operands.moving):
            return False
        return _tokens(task, self._decoded if task.phase == "decode" else self._prefilled) <= FEW_TOKENS

    def later(self, task: Task, *arrays: Array, micro_batch: int | None = None) -> None:
        """Evaluate a task's results, or remember them for a later evaluation if the task is deferred.

        Args:
            arrays: the results.
            micro_batch: number of the results' micro-batch; None for the task's own.
        """
        number = task.micro_batch if micro_batch is None else micro_batch
        if self.defers(task):
            self._open.setdefault(number, []).extend(arrays)
        else:
            self.settle(number, *arrays)

    def settle(self, micro_batch: int, *arrays: Array) -> None:
        """Evaluate arrays of a micro-batch together with all of its deferred results."""
        self.count += 1
        mx.eval(arrays, self._open.pop(micro_batch, ()))

    def on_host(self, array: Array) -> npt.NDArray[Any]:
        """Copy an evaluated array to a numpy array."""
        return np.array(array)

    def value(
        self, task: Task, read: Callable[..., Any], *arrays: Array, beside: Sequence[Array] = ()
    ) -> Any:
        """Evaluate arrays and call `read` with copies of them on the host; returns the result of `read`.

        Args:
            read: function that makes the task's value from the copies, which are numpy arrays.
            beside: arrays that are evaluated at the same time but not passed to `read`.
        """
        self.settle(task.micro_batch, *arrays, *beside)
        return read(*map(self.on_host, arrays))

    def settled(self, value: Any) -> Any:
        """Return a task's value unchanged: the method `value` has copied it to the host already."""
        return value

    def close_others(self, micro_batch: int) -> None:
        """Evaluate all deferred results of the other micro-batches, before a micro-batch writes to a KV cache.

        MLX would otherwise copy the whole cache before it writes, since deferred results may still read the cache.
        """
        for other in [each for each in self._open if each != micro_batch]:
            self.settle(other)


def _tokens(task: Task, tokens: Mapping[int, int]) -> int:
    """Return the number of tokens that a task computes, in all of its micro-batches.

    tokens: the number of tokens of each micro-batch, by its number.
    """
    if not task.ranges:
        return tokens[task.micro_batch]
    return sum(tokens[micro_batch] for micro_batch, _, _ in task.ranges)

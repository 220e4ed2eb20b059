"""What the verbs need beside kernels, for torch or MLX to implement: tensors on the host, and running experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moesched.tasks import Task

from ..kernels.seam import Routed


class Library(Protocol):
    """Evaluates tensors of torch or MLX and copies them to the host."""

    def computing(self) -> AbstractContextManager[object]:
        """The context manager to compute in outside of bound kernels, and in kernels on many rows."""

    def settle(self, micro_batch: int, *tensors: Any) -> None:
        """Evaluate these lazy tensors of a micro-batch, and all its earlier results."""

    def on_host(self, tensor: Any) -> npt.NDArray[Any]:
        """Copy a tensor to the host's memory."""

    def value(self, task: Task, read: Callable[..., Any], *tensors: Any, beside: Sequence[Any] = ()) -> Any:
        """Copy tensors to the host and call `read` with them; its result is the value of a task.

        Where a device issues tasks ahead of their tensors, this returns a value that is read when the task ends.

        beside: lazy tensors that are evaluated at the same time, and not read.
        """

    def settled(self, value: Any) -> Any:
        """Read now what `value` or `Experts.group` returned, if that has not been done."""


class Experts(Protocol):
    """Runs the experts of a layer on rows of micro-batches."""

    def group(self, task: Task, routed: Routed, read: Callable[..., Any], *tensors: Any) -> Any:
        """Sort a micro-batch's rows by expert and keep them in its state; returns the task's value, as `value` does.

        read: makes the value from the experts of each token and these tensors, all on the host: a mapping from each
            expert that has rows to their number.
        """

    def scores(self, logits_TE: Any) -> Any:
        """Each expert's probability by the router (E), float32, averaged over the tokens."""

    def run_all(self, task: Task, counts: Mapping[int, int], weights: Any) -> None:
        """Run all experts of a layer that have rows; `counts` maps each of them to its number of rows."""

    def run_shared(self, task: Task, weights: Any) -> None:
        """Run a layer's shared expert, which every token uses, if the layer has one."""

    def run_expert(self, task: Task) -> None:
        """Run one expert on its rows of one or several micro-batches; each has the results that it would have alone."""

    def warm_expert(self, task: Task) -> None:
        """Run one expert on a row of zeros, only to read its weights."""


def with_rows(counts: Sequence[int]) -> dict[int, int]:
    """Map each expert that has rows to their number; `counts` has a number for every expert, 0 included."""
    return {expert: count for expert, count in enumerate(counts) if count}


def counted(experts_Tk: npt.NDArray[Any], experts: int) -> list[int]:
    """Count the rows of each of `experts` experts, given the experts that each token chose."""
    counts: list[int] = np.bincount(experts_Tk.ravel(), minlength=experts).tolist()
    return counts

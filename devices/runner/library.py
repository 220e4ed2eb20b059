"""The interfaces that torch and MLX implement for the runner: copies of tensors to the host, and running experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moesched.tasks import Task

from ..kernels.seam import RouterOutput


class Library(Protocol):
    """The interface to evaluate tensors of torch or MLX and to copy them to the host."""

    def computing(self) -> AbstractContextManager[object]:
        """Return the context manager in which torch or MLX is called directly: torch's inference mode, or an empty one.

        Bound kernels enter it by themselves, except kernels for many rows.
        """

    def settle(self, micro_batch: int, *tensors: Any) -> None:
        """Evaluate lazy tensors of a micro-batch, together with all of its other results that are not evaluated yet."""

    def on_host(self, tensor: Any) -> npt.NDArray[Any]:
        """Copy a tensor to the host's memory."""

    def value(self, task: Task, read: Callable[..., Any], *tensors: Any, beside: Sequence[Any] = ()) -> Any:
        """Copy tensors to the host, and return `read` of these arrays as the task's value.

        On a device that issues tasks ahead of their tensors, the result is an object that is read when the task ends.

        beside: lazy tensors to evaluate at the same time, without a copy.
        """

    def settled(self, value: Any) -> Any:
        """Return a task's finished value, from the result of `value` or `Experts.group`; waits until it is readable."""


class Experts(Protocol):
    """The interface to run the experts of a layer on rows of micro-batches."""

    def group(self, task: Task, routed: RouterOutput, read: Callable[..., Any], *tensors: Any) -> Any:
        """Sort a micro-batch's rows by expert and keep them in its state; returns the task's value, as `Library.value`.

        Args:
            routed: the router's result.
            read: function that makes the value, the number of rows of each expert that has any, from each token's
                experts and `tensors`, all as arrays on the host.
        """

    def scores(self, logits_TE: Any) -> Any:
        """Return the probability that the router gives each expert, averaged over the tokens: (E), float32."""

    def run_all(self, task: Task, counts: Mapping[int, int], weights: Any) -> None:
        """Run a layer's experts on their rows; counts: number of rows of each expert that has any."""

    def run_shared(self, task: Task, weights: Any) -> None:
        """Run a layer's shared expert, if there is one, on all tokens of the task's micro-batch."""

    def run_expert(self, task: Task) -> None:
        """Run the task's expert on rows of one or several micro-batches; each gets the same results as alone."""

    def warm_expert(self, task: Task) -> None:
        """Run one expert on a row of zeros, only to read its weights."""


def with_rows(counts: Sequence[int]) -> dict[int, int]:
    """Return the number of rows of each expert that has any; counts: a number for every expert, which may be 0."""
    return {expert: count for expert, count in enumerate(counts) if count}


def counted(experts_Tk: npt.NDArray[Any], experts: int) -> list[int]:
    """Count the rows of each of `experts` experts; `experts_Tk` has the k experts that each of T tokens chose."""
    counts: list[int] = np.bincount(experts_Tk.ravel(), minlength=experts).tolist()
    return counts

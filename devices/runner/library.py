"""The interfaces that torch and MLX implement for the runner: one copies tensors to the host, one runs experts."""

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
        """Return the context in which the runner calls torch or MLX: torch's inference mode; for MLX, an empty context.

        Kernels in torch for the operations embed, attention_inputs, attention and greedy enter the mode by themselves.
        """

    def settle(self, micro_batch: int, *tensors: Any) -> None:
        """Evaluate lazy tensors of a micro-batch, and all other results of this micro-batch not evaluated yet."""

    def on_host(self, tensor: Any) -> npt.NDArray[Any]:
        """Copy a tensor to the host's memory."""

    def value(self, task: Task, read: Callable[..., Any], *tensors: Any, beside: Sequence[Any] = ()) -> Any:
        """Copy tensors to the host, call `read` with the copies, and return its result: the task's value.

        A device that issues tasks before their tensors are computed returns an object in place of the value. The value
        is read from this object when the task has ended.

        Args:
            read: function that makes the value from the copies, which are arrays on the host.
            beside: lazy tensors to evaluate at the same time; they are not copied.
        """

    def settled(self, value: Any) -> Any:
        """Wait until a task's value can be read, and return it.

        value: the result of the method `value` or of `Experts.group`.
        """


class Experts(Protocol):
    """The interface to run the experts of a layer on rows of micro-batches."""

    def group(self, task: Task, routed: RouterOutput, read: Callable[..., Any], *tensors: Any) -> Any:
        """Sort a micro-batch's rows by expert, and keep them in the micro-batch's state.

        Args:
            routed: the router's result for the micro-batch's tokens.
            read: function that computes the task's value on the host: the number of rows of each expert that has rows.
                It takes arrays: the experts of each token, and then `tensors`.
            tensors: further results of the router, such as its scores.

        Returns:
            the task's value, in the form that `Library.value` returns.
        """

    def scores(self, logits_TE: Any) -> Any:
        """Return the probability that the router gives each of E experts, averaged over the tokens: (E), float32.

        logits_TE: the router's logits for T tokens.
        """

    def run_all(self, task: Task, counts: Mapping[int, int], weights: Any) -> None:
        """Run a layer's experts on their rows of the task's micro-batch.

        Args:
            counts: number of rows of each expert that has any.
            weights: the weights of the layer.
        """

    def run_shared(self, task: Task, weights: Any) -> None:
        """Run a layer's shared expert, if there is one, on all tokens of the task's micro-batch."""

    def run_expert(self, task: Task) -> None:
        """Run the task's expert on rows of one or several micro-batches.

        A micro-batch's results are the same as if the task were for this micro-batch alone.
        """

    def warm_expert(self, task: Task) -> None:
        """Run one expert on a row of zeros, only to read its weights: Apple's GPU driver unwires weights left idle."""


def with_rows(counts: Sequence[int]) -> dict[int, int]:
    """Return the number of rows of each expert that has any.

    counts: the number of rows of every expert, which may be 0.
    """
    return {expert: count for expert, count in enumerate(counts) if count}


def counted(experts_Tk: npt.NDArray[Any], experts: int) -> list[int]:
    """Count the rows of each expert.

    Args:
        experts_Tk: the k experts that the router chose for each of T tokens.
        experts: number of experts of the layer.
    """
    counts: list[int] = np.bincount(experts_Tk.ravel(), minlength=experts).tolist()
    return counts

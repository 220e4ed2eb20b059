"""Operations of torch or MLX that the verbs need beside kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moesched.tasks import Task

from ..kernels.seam import Routed


class Library(Protocol):
    """Tensors between kernels and the host."""

    def computing(self) -> AbstractContextManager[object]:
        """The context for computations outside bound kernels, and for kernels on many rows."""

    def settle(self, micro_batch: int, *tensors: Any) -> None:
        """Compute lazy tensors of a micro-batch, and all its earlier results."""

    def on_host(self, tensor: Any) -> npt.NDArray[Any]:
        """Copy a tensor to the host's memory."""

    def value(self, task: Task, read: Callable[..., Any], *tensors: Any, beside: Sequence[Any] = ()) -> Any:
        """The value of a task, which `read` makes of tensors on the host.

        It is read now, or, where tasks are issued ahead of their tensors, by what awaits the task's end.

        beside: lazy tensors that are computed at the same time.
        """

    def settled(self, value: Any) -> Any:
        """A value of `value`, read now."""


class Experts(Protocol):
    """The experts of a layer on rows of micro-batches."""

    def group(self, task: Task, routed: Routed, read: Callable[..., Any], *tensors: Any) -> Any:
        """Keep the rows of each expert in the micro-batch's state; returns the task's value.

        read: makes the value, a mapping with the number of rows of each expert that has any, of the experts of each
            token and these tensors, all on the host.
        """

    def scores(self, logits_TE: Any) -> Any:
        """Each expert's probability by the router (E), float32, averaged over the tokens."""

    def run_all(self, task: Task, counts: Mapping[int, int], weights: Any) -> None:
        """Run all experts of a layer that have rows; `counts` has the rows of each, as `group` returned them."""

    def run_shared(self, task: Task, weights: Any) -> None:
        """Run the network of a layer that every token uses, if it has one."""

    def run_expert(self, task: Task) -> None:
        """Run one expert on its rows of one or several micro-batches, each as if it ran alone."""

    def warm_expert(self, task: Task) -> None:
        """Run one expert on a row of zeros, only to read its weights."""


def with_rows(counts: Sequence[int]) -> dict[int, int]:
    """The number of rows of each expert that has any, by expert; `counts` has those of all experts."""
    return {expert: count for expert, count in enumerate(counts) if count}


def counted(experts_Tk: npt.NDArray[Any], experts: int) -> list[int]:
    """The number of rows of each of `experts` experts, by the choices of tokens."""
    counts: list[int] = np.bincount(experts_Tk.ravel(), minlength=experts).tolist()
    return counts

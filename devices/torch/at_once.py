"""Torch's implementations of the runner's `Library`: one for the CPU, and one for a GPU, whose results come later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy.typing as npt
import torch

from moesched.tasks import Task

from ..products.linear import Tensor
from .copies import wait_for_copies
from .read_back import ReadBack


class AtOnce:
    """Reads results on the CPU, where a kernel has computed its results once its call returns."""

    computing: type[AbstractContextManager[object]] = torch.inference_mode

    def settle(self, micro_batch: int, *tensors: Tensor) -> None:
        """Do nothing: unlike MLX's, torch's tensors need no evaluation."""

    def on_host(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Return a tensor as an array on the host; a GPU's tensor is copied, and this waits for the end of the copy."""
        array: npt.NDArray[Any] = tensor.cpu().numpy()
        return array

    def value(
        self, task: Task, read: Callable[..., Any], *tensors: Tensor, beside: Sequence[Tensor] = ()
    ) -> Any:
        """Call `read` with the tensors as arrays on the host; returns its result, which is the task's value.

        Args:
            read: a function that makes the value from the arrays.
            beside: tensors that MLX evaluates at the same time; not used by torch.
        """
        return read(*map(self.on_host, tensors))

    def settled(self, value: Any) -> Any:
        """Return a task's value unchanged: the method `value` has read the tensors already."""
        return value


class OnStream(AtOnce):
    """Copies results from a GPU to the host on the current stream; a result is read after its copy has ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read_back = ReadBack()

    def value(
        self, task: Task, read: Callable[..., Any], *tensors: Tensor, beside: Sequence[Tensor] = ()
    ) -> Any:
        """Start to copy tensors to page-locked memory; returns a `Later`, whose `get` calls `read` with the copies.

        beside: tensors that MLX evaluates at the same time; not used by torch.
        """
        return Later(read, self._read_back, tensors)

    def settled(self, value: Any) -> Any:
        """Wait until the current stream has done all its work; returns the task's value.

        value: the value, or a `Later` that reads it.
        """
        wait_for_copies(self._device)
        return settled(value)


class Later:
    """The value of a task that a stream has not finished yet; the constructor starts to copy its results to the host.

    Args:
        read: a function that makes the value from the copies, and must not keep references to them.
        read_back: gives memory on the host for the copies, and takes it back once the value was read.
        tensors: the task's results on the accelerator.
    """

    def __init__(self, read: Callable[..., Any], read_back: ReadBack, tensors: Sequence[Tensor]) -> None:
        self._read = read
        self._read_back = read_back
        self._copies = [read_back.copied(tensor) for tensor in tensors]

    def get(self) -> Any:
        """Make the value from the copies; may be called only after the stream has run the task, and only once."""
        value = self._read(*(copy.numpy() for copy, _ in self._copies))
        for _, memory in self._copies:
            if memory is not None:
                self._read_back.free(memory)
        return value


def settled(value: Any) -> Any:
    """Return the value of a task that has ended: what `value` reads if it is a `Later`, otherwise `value` itself."""
    return value.get() if isinstance(value, Later) else value


def library_of(accelerator: torch.device) -> AtOnce:
    """Return the object that copies results to the host: an `AtOnce` on the CPU, an `OnStream` on a GPU."""
    return AtOnce() if accelerator.type == "cpu" else OnStream(accelerator)

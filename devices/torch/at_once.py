"""Torch's implementations of the runner's `Library`: one for the CPU, one for a GPU, where results arrive later."""

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
    """Copies results to the host where torch runs on the CPU: a kernel's results are complete when its call returns."""

    computing: type[AbstractContextManager[object]] = torch.inference_mode

    def settle(self, micro_batch: int, *tensors: Tensor) -> None:
        """Do nothing: unlike MLX's, torch's tensors need no evaluation."""

    def on_host(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Copy a tensor to the host's memory, and wait until the copy is done."""
        array: npt.NDArray[Any] = tensor.cpu().numpy()
        return array

    def value(
        self, task: Task, read: Callable[..., Any], *tensors: Tensor, beside: Sequence[Tensor] = ()
    ) -> Any:
        """Call `read` with copies of the tensors on the host; returns the result of `read`, which is the task's value.

        beside: not used by torch.
        """
        return read(*map(self.on_host, tensors))

    def settled(self, value: Any) -> Any:
        """Return a task's value unchanged: the method `value` has read the tensors already."""
        return value


class OnStream(AtOnce):
    """Copies results to the host where torch runs on a GPU: copies run on a stream, and are read at the task's end."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read_back = ReadBack()

    def value(
        self, task: Task, read: Callable[..., Any], *tensors: Tensor, beside: Sequence[Tensor] = ()
    ) -> Any:
        """Start to copy tensors to page-locked memory; returns a `Later`, which calls `read` with the copies on demand.

        beside: not used by torch.
        """
        return Later(read, self._read_back, tensors)

    def settled(self, value: Any) -> Any:
        """Wait until the current stream has done all its work; returns the task's value.

        value: the value, or a `Later` that reads it.
        """
        wait_for_copies(self._device)
        return settled(value)


class Later:
    """The value of a task that a stream has not finished yet; the constructor starts the copies to the host.

    Args:
        read: a function that makes the value from the copies, and must not keep references to them.
        read_back: gives the host's memory for the copies, and takes it back when the value was read.
        tensors: results on the accelerator.
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
    """Return the value of a task that has ended: the value that a `Later` reads; any other value is unchanged."""
    return value.get() if isinstance(value, Later) else value


def library_of(accelerator: torch.device) -> AtOnce:
    """Return the object that copies results to the host: an `AtOnce` on the CPU, an `OnStream` on a GPU."""
    return AtOnce() if accelerator.type == "cpu" else OnStream(accelerator)

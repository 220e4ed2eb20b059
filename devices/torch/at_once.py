"""The runner's `Library` for torch: on the CPU, where results are there at once, and on the stream of a GPU."""

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
    """The `Library` of torch on the CPU: a kernel's results are there when its call returns."""

    computing: type[AbstractContextManager[object]] = torch.inference_mode

    def settle(self, micro_batch: int, *tensors: Tensor) -> None:
        """Do nothing: torch's tensors are not lazy."""

    def on_host(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Copy a tensor to the host's memory; waits for the device."""
        array: npt.NDArray[Any] = tensor.cpu().numpy()
        return array

    def value(
        self, task: Task, read: Callable[..., Any], *tensors: Tensor, beside: Sequence[Tensor] = ()
    ) -> Any:
        """Copy tensors to the host and call `read` with them; returns its result, the value of a task."""
        return read(*map(self.on_host, tensors))

    def settled(self, value: Any) -> Any:
        """Return the value unchanged: it has been read."""
        return value


class OnStream(AtOnce):
    """The `Library` of torch on a GPU: results are copied to the host on the stream, and read when a task has ended."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read_back = ReadBack()

    def value(
        self, task: Task, read: Callable[..., Any], *tensors: Tensor, beside: Sequence[Tensor] = ()
    ) -> Any:
        """Start to copy tensors to the host's page-locked memory; returns a `Later`, which calls `read` with them."""
        return Later(read, self._read_back, tensors)

    def settled(self, value: Any) -> Any:
        """Wait until the current stream has done all its work, then read the value."""
        wait_for_copies(self._device)
        return settled(value)


class Later:
    """The value of a task that the stream has yet to run; the constructor starts the copies to the host.

    Args:
        read: makes the value from arrays on the host, and keeps none of them.
        read_back: gives the host's memory for the copies.
        tensors: results on the accelerator.
    """

    def __init__(self, read: Callable[..., Any], read_back: ReadBack, tensors: Sequence[Tensor]) -> None:
        self._read = read
        self._read_back = read_back
        self._copies = [read_back.copied(tensor) for tensor in tensors]

    def get(self) -> Any:
        """Read the value; the stream must have run the task."""
        value = self._read(*(copy.numpy() for copy, _ in self._copies))
        for _, memory in self._copies:
            if memory is not None:
                self._read_back.free(memory)
        return value


def settled(value: Any) -> Any:
    """The value of a task that has ended: that of a `Later`, or the value itself."""
    return value.get() if isinstance(value, Later) else value


def library_of(accelerator: torch.device) -> AtOnce:
    """The runner's library for an accelerator."""
    return AtOnce() if accelerator.type == "cpu" else OnStream(accelerator)

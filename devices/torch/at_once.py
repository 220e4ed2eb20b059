"""Tensors of torch between kernels and the host: computed at once on the CPU, or in the order of a stream."""

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
    """The `Library` of torch on the CPU: tensors are computed when a kernel is called."""

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
        """The value of a task, which `read` makes of tensors on the host."""
        return read(*map(self.on_host, tensors))

    def settled(self, value: Any) -> Any:
        """The value itself."""
        return value


class OnStream(AtOnce):
    """The `Library` of torch on a stream: tensors are computed in its order, and copied to the host behind them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._read_back = ReadBack()

    def value(
        self, task: Task, read: Callable[..., Any], *tensors: Tensor, beside: Sequence[Tensor] = ()
    ) -> Any:
        """A `Later`; the copies are asynchronous, to page-locked memory."""
        return Later(read, self._read_back, tensors)

    def settled(self, value: Any) -> Any:
        """The value, once the current stream has done all its work."""
        wait_for_copies(self._device)
        return settled(value)


class Later:
    """A value that is read when the stream has run its task; it begins the copies to the host.

    Args:
        read: makes the value of arrays on the host, and keeps none of them.
        tensors: results on the accelerator.
    """

    def __init__(self, read: Callable[..., Any], read_back: ReadBack, tensors: Sequence[Tensor]) -> None:
        self._read = read
        self._read_back = read_back
        self._copies = [read_back.copied(tensor) for tensor in tensors]

    def get(self) -> Any:
        """The value; the task's stream must have run the task."""
        value = self._read(*(copy.numpy() for copy, _ in self._copies))
        for _, memory in self._copies:
            if memory is not None:
                self._read_back.free(memory)
        return value


def settled(value: Any) -> Any:
    """The value of a task that has ended."""
    return value.get() if isinstance(value, Later) else value


def library_of(accelerator: torch.device) -> AtOnce:
    """The library for kernels on this device."""
    return AtOnce() if accelerator.type == "cpu" else OnStream(accelerator)

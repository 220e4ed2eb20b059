"""Copies of integers from the host to an accelerator, through a ring of page-locked memory.

Ordinary memory is not used: a copy from it blocks the calling thread until the stream has reached the copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from moesched.models.host_buffers import NUMBER_BYTES, NUMBER_RING_BYTES

from .locked_memory import locked_if_possible

Tensor = torch.Tensor

HOST = torch.device("cpu")


MOST_NUMBERS = NUMBER_RING_BYTES // (2 * NUMBER_BYTES)
"""Largest number of integers that half of the ring holds."""


class NumberRing:
    """Copies integers to an accelerator through page-locked memory in two halves, which are filled in turn.

    A half is filled again only after the copies from it have ended. All copies that have not ended must be on the same
    stream. The memory is allocated at the first use.

    Args:
        device: the accelerator's torch device.
        numbers: number of integers in a half.
    """

    def __init__(self, device: torch.device, numbers: int = MOST_NUMBERS) -> None:
        self._module: Any = torch.get_device_module(device)
        self._device = device
        self._most = numbers
        self._halves: deque[Tensor] = deque()
        """The two halves: first the one that is being filled."""
        self._filled = 0
        self._other_copied: Any = None
        """The event that happens once the copies from the other half have ended; None before there are such copies."""

    def indices(self, numbers: Sequence[int]) -> Tensor:
        """Make an int64 tensor of these integers on the accelerator, by asynchronous copies on the current stream."""
        there = torch.empty(len(numbers), dtype=torch.int64, device=self._device)
        self.upload(numbers, there)
        return there

    def upload(self, numbers: Sequence[int], into: Tensor) -> None:
        """Copy integers to the first entries of an accelerator's int64 tensor, asynchronously on the current stream."""
        flat = into.view(-1)
        for start in range(0, len(numbers), self._most):
            piece = numbers[start : start + self._most]
            flat[start : start + len(piece)].copy_(self._held(piece), non_blocking=True)

    def _held(self, numbers: Sequence[int]) -> Tensor:
        """Write integers to the half of the ring that is being filled; returns the part that has these integers."""
        if not self._halves:
            nbytes = 2 * self._most * NUMBER_BYTES
            memory = locked_if_possible(nbytes, self._device, "memory for indices")
            self._halves.extend(memory.view(torch.int64).split(self._most))
        if self._filled + len(numbers) > self._most:
            self._turn()
        held: Tensor = self._halves[0][self._filled : self._filled + len(numbers)]
        held.numpy()[:] = numbers
        self._filled += len(numbers)
        return held

    def _turn(self) -> None:
        """Wait for the copies from the other half of the ring, and begin to fill that half."""
        if self._other_copied is not None and not self._other_copied.query():
            self._other_copied.synchronize()
        self._other_copied = self._module.Event(blocking=True)
        self._other_copied.record()
        self._halves.rotate()
        self._filled = 0


def wait_for_copies(device: torch.device) -> None:
    """Block until the device's current stream has finished all its work; does nothing on the CPU."""
    if device.type != "cpu":
        torch.get_device_module(device).current_stream(device).synchronize()

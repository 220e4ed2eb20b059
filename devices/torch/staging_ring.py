"""A ring of page-locked buffers, through which weights are copied from ordinary memory to a GPU at full speed."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from moesched.models.host_buffers import RING_SLOTS, ring_slot_bytes

from ..native.copy_team import Pair
from .locked_memory import locked_bytes

Tensor = torch.Tensor
Pieces = Iterable[tuple[Tensor, int]]
"""Pieces of the host's memory, each with its offset in the target of a copy; the offsets ascend."""


class CopiesBytes(Protocol):
    """The interface of objects that copy bytes within the host's memory, such as a team of threads."""

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy bytes from source to target for each pair (target, source); returns when all bytes are copied.

        A target has as many bytes as its source.
        """


class StagingRing:
    """A ring of page-locked buffers: threads fill one while the GPU copies from those that were filled before.

    Args:
        most: bytes of the largest copy.
        team: the threads that fill buffers.
        device: the GPU's torch device.

    Raises:
        OutOfMemory: the system refused to lock memory.
    """

    def __init__(self, most: int, team: CopiesBytes, device: torch.device) -> None:
        module: Any = torch.get_device_module(device)
        self._size = ring_slot_bytes(most)
        self._slots = locked_bytes(RING_SLOTS * self._size, device).split(self._size)
        self._copied = [module.Event(blocking=True) for _ in self._slots]
        self._team = team
        self._filled = 0
        self._lock = threading.Lock()

    def copy(self, pieces: Pieces, target: Tensor) -> None:
        """Copy pieces of the host's memory to a target on the GPU, on the current stream.

        Returns when all pieces have been read, before the last ones are on the GPU.

        Args:
            pieces: uint8 tensors, each with its offset in the target; the offsets ascend.
            target: uint8 tensor on the GPU.
        """
        with self._lock:
            for first, group in _grouped(pieces, self._size):
                number = self._filled % RING_SLOTS
                slot, copied = self._slots[number], self._copied[number]
                copied.synchronize()
                self._team.copy([(slot[at - first :][: len(each)], each) for each, at in group])
                last, at = group[-1]
                end = at + len(last)
                target[first:end].copy_(slot[: end - first], non_blocking=True)
                copied.record()
                self._filled += 1


def _grouped(pieces: Pieces, most: int) -> Iterator[tuple[int, Sequence[tuple[Tensor, int]]]]:
    """Group neighbouring pieces so that each group spans at most `most` bytes of the target; long pieces are cut.

    Returns:
        for each group, the offset of its first piece in the target, and all its pieces with their offsets.
    """
    group: list[tuple[Tensor, int]] = []
    first = 0
    for piece, at in pieces:
        while len(piece):
            if group and at >= first + most:
                yield first, group
                group = []
            if not group:
                first = at
            room = first + most - at
            group.append((piece[:room], at))
            piece, at = piece[room:], at + room  # what is left of it
    if group:
        yield first, group

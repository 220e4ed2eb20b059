"""A ring of page-locked buffers, through which weights go from ordinary memory to a GPU at the rate of its link."""

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
"""Pieces of the host's memory, each with its offset in a target, ascending."""


class CopiesBytes(Protocol):
    """A copier of bytes within the host's memory."""

    def copy(self, pairs: Sequence[Pair]) -> None:
        """Copy each source into its target; all are copied on return."""


class StagingRing:
    """A ring of buffers that a team of threads fills in turn, while the GPU copies from the ones filled before.

    most: bytes of the largest copy.

    Raises:
        OutOfMemory: the system locks no more memory.
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
        """Copy pieces to their offsets in a target on the GPU, on the current stream; returns when all were read."""
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
    """Yield groups of neighbouring pieces that span at most `most` bytes of the target, each after its first offset."""
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

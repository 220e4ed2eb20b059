"""Frames of other ranks that came before their turn: kept until then, up to a limit."""

from __future__ import annotations

from typing import Any

from moesched.errors import TransportError

from .frames import Frame, Kind
from .mesh import Mesh

AHEAD_FRAMES = 1024
"""How many frames of one rank may wait for their turn; the ranks' queues make whoever sends more wait before that."""


class Inbox:
    """What was received before its turn.

    Attributes:
        reached: the last frame of each rank.
        left: why ranks left on their own account.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.reached: dict[int, Frame] = {}
        self.left: dict[int, str] = {}
        self._mesh = mesh
        self._sequence = 0
        self._waiting: dict[int, list[Frame]] = {}

    def begin(self, sequence: int) -> list[Frame]:
        """Turn to an exchange; returns the frames of it that came before."""
        self._sequence = sequence
        return self._waiting.pop(sequence, [])

    def accept(self, message: Any) -> Frame | None:
        """Take in a message; returns the frame where it belongs to the exchange that this is about.

        Raises:
            TransportError: a rank is too far ahead.
        """
        frame = self._mesh.read(message)
        if frame is None:
            return None
        if frame.kind is Kind.LEAVE:
            self.left[frame.rank] = frame.text
        if frame.kind is Kind.LEAVE or frame.sequence < self._sequence:
            return None
        self.reached[frame.rank] = frame
        if frame.sequence == self._sequence:
            return frame
        self._waiting.setdefault(frame.sequence, []).append(frame)
        ahead = sum(each.rank == frame.rank for frames in self._waiting.values() for each in frames)
        if ahead > AHEAD_FRAMES:
            raise TransportError(f"rank {frame.rank} is {ahead} frames ahead")
        return None

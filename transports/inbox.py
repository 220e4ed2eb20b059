"""The inbox of a rank: keeps frames that other ranks sent too early until their exchange begins, up to a limit."""

from __future__ import annotations

from typing import Any

from moesched.errors import TransportError

from .frames import Frame, Kind
from .mesh import Mesh

AHEAD_FRAMES = 1024
"""Most early frames from one rank; long before this limit, full queues make a faster sender wait."""


class Inbox:
    """Sorts messages into frames of the current exchange and frames of later ones.

    Attributes:
        reached: the last frame of each rank, by rank.
        departed: the reasons of ranks that closed their transport, by rank.
        early: frames of later exchanges, by the exchange's number.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.reached: dict[int, Frame] = {}
        self.departed: dict[int, str] = {}
        self.early: dict[int, list[Frame]] = {}
        self._mesh = mesh
        self._sequence = 0

    def begin(self, sequence: int) -> list[Frame]:
        """Begin the exchange with this number, and return its frames that came early."""
        self._sequence = sequence
        return self.early.pop(sequence, [])

    def accept(self, message: Any) -> Frame | None:
        """Decode a message; return its frame if it is of the current exchange, else None; keep frames of later ones.

        Raises:
            TransportError: more than AHEAD_FRAMES (1024) frames of the sender have come too early.
        """
        frame = self._mesh.read(message)
        if frame is None:
            return None
        if frame.kind is Kind.LEAVE:
            self.departed[frame.rank] = frame.text
        if frame.kind in (Kind.LEAVE, Kind.HERE) or frame.sequence < self._sequence:
            return None
        self.reached[frame.rank] = frame
        if frame.sequence == self._sequence:
            return frame
        self.early.setdefault(frame.sequence, []).append(frame)
        ahead = sum(each.rank == frame.rank for frames in self.early.values() for each in frames)
        if ahead > AHEAD_FRAMES:
            raise TransportError(f"rank {frame.rank} is {ahead} frames ahead")
        return None

"""Frames of other ranks that came before their turn: kept until then, up to a limit."""

from __future__ import annotations

from collections import defaultdict

from moesched.errors import TransportError

from .frames import Frame, Kind
from .mesh import Mesh

AHEAD_FRAMES = 1024
"""How many frames of one rank may wait for their turn; the ranks' queues make whoever sends more wait before that."""


class Inbox:
    """What was received and not yet asked for.

    Attributes:
        reached: the last exchange that each rank was heard in.
        left: why ranks left on their own account.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.reached: dict[int, Frame] = {}
        self.left: dict[int, str] = {}
        self._mesh = mesh
        self._sequence = 0
        self._frames: dict[int, dict[tuple[int, Kind], Frame]] = defaultdict(dict)

    def begin(self, sequence: int) -> list[Frame]:
        """Turn to an exchange, and forget those before; returns what is there of it."""
        for earlier in range(self._sequence, sequence):
            self._frames.pop(earlier, None)
        self._sequence = sequence
        return list(self._frames[sequence].values())

    def take(self, rank: int, kind: Kind) -> Frame | None:
        """A rank's frame of the exchange that this is about, once."""
        return self._frames[self._sequence].pop((rank, kind), None)

    def receive(self) -> Frame | None:
        """Take in the next frame, if there is one; returns it where it belongs to the exchange that this is about.

        Raises:
            TransportError: a rank is too far ahead.
        """
        frame = self._mesh.receive()
        if frame is None:
            return None
        if frame.kind is Kind.LEAVE:
            self.left[frame.rank] = frame.text
            return None
        if frame.sequence < self._sequence:
            return None
        return self._keep(frame)

    def _keep(self, frame: Frame) -> Frame | None:
        rank, key = frame.rank, (frame.rank, frame.kind)
        self.reached[rank] = frame
        if key in self._frames[frame.sequence]:
            self._mesh.refuse("it came before")
            return None
        self._frames[frame.sequence][key] = frame
        if frame.sequence == self._sequence:
            return frame
        waiting = sum(1 for frames in self._frames.values() for each, _ in frames if each == rank)
        if waiting > AHEAD_FRAMES:
            raise TransportError(f"rank {rank} is {waiting} exchanges ahead")
        return None

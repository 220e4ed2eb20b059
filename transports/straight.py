"""An all-reduce of small parts as nearly all of them go: the next frames are the others' parts, and all of them.

Every token takes this path in every layer, mostly with cold caches, so it makes few calls. A `Turn` does the rest where
another frame comes, or none in time.
"""

from __future__ import annotations

import sys
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moesched.seams import Exchange

from .frames import SENDER_BYTES, common_of_parts
from .listener import Message
from .waiting import Side

if TYPE_CHECKING:
    from moesched.seams import Array

if sys.platform == "linux":
    from os import sched_yield
else:

    def sched_yield() -> None:
        """Keep the core: only Linux has it."""


PAUSE_SECONDS = 100e-6
"""Time without an exchange after which ZeroMQ's thread is given the core, should it be this thread's."""


class Rest(NamedTuple):
    """The unfinished part of a swap, for a `Turn`.

    Attributes:
        unsent: the ranks that have yet to be sent the part.
        message: one that is not the expected part of another rank; None where none came in time.
    """

    unsent: tuple[int, ...]
    message: Message | None = None


def swap(side: Side, exchange: Exchange, part: Array, parts: dict[int, Array]) -> Rest | None:
    """Send a part to all other ranks, and add theirs to `parts`, which has it; returns the rest, None if all is done.

    A frame that begins as this rank's own, but for the sender, is not decoded. Parts are views of the frames.

    Raises:
        TransportError: the array cannot be sent.
    """
    mesh, others = side.mesh, side.others
    ticket, signature, step, layer = exchange
    after = common_of_parts((side.epoch, side.sequence, ticket, step, layer), part, signature)
    frame = b"".join((side.sender, after, part.data))
    nbytes = len(frame)
    if nbytes > mesh.max_bytes:
        return Rest(others)
    for sent, rank in enumerate(others):
        if not mesh.send(rank, frame):
            return Rest(others[sent:])
    if monotonic() - side.swapped > PAUSE_SECONDS:
        sched_yield()
    senders, start = side.senders, SENDER_BYTES + len(after)
    while len(parts) <= len(others):
        message = mesh.receive()
        if message is None:
            return Rest(())
        data = message.content.buffer
        sender = senders.get(bytes(data[:SENDER_BYTES]))
        alike = data[SENDER_BYTES:start] == after and len(data) == nbytes
        if sender is None or sender in parts or not alike or not mesh.is_from(message, sender):
            return Rest((), message)
        parts[sender] = np.ndarray(part.shape, part.dtype, data, start)
    side.sequence += 1
    side.swapped = monotonic()
    return None

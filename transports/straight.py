"""The fast path of an all-reduce of small parts, for the usual case that only the other ranks' parts arrive.

Every token takes this path in every layer, mostly with cold CPU caches, so the path makes few calls. If another message
arrives first, or none in time, an `ExchangePart` does the rest.
"""

from __future__ import annotations

import sys
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moesched.seams import Exchange

from .frames import SENDER_BYTES, common_of_parts
from .listener import Message
from .waiting import TransportState

if TYPE_CHECKING:
    from moesched.seams import Array

if sys.platform == "linux":
    from os import sched_yield
else:

    def sched_yield() -> None:
        """Keep the core, as only Linux has `os.sched_yield`."""


PAUSE_SECONDS = 100e-6
"""Seconds without an exchange after which this thread gives its core to ZeroMQ's thread, in case they share one."""


class Rest(NamedTuple):
    """The rest of an all-reduce that `swap` has left to an `ExchangePart`.

    Attributes:
        unsent: the ranks to which the part has still to be sent.
        message: a received message other than the expected parts. None if no message came in time, or if `swap` did not
            wait for messages, because it could not send the part to all ranks.
    """

    unsent: tuple[int, ...]
    message: Message | None = None


def swap(state: TransportState, exchange: Exchange, part: Array, parts: dict[int, Array]) -> Rest | None:
    """Send `part` to all other ranks, and put their parts into `parts` by rank; return the rest to do, None if done.

    Received parts are views of the received messages. A message is recognised without decoding: its bytes equal those
    of the message that this rank sent, except for the sender's number and the array's elements.

    Raises:
        TransportError: the array cannot be sent.
    """
    mesh, others = state.mesh, state.others
    ticket, signature, step, layer = exchange
    after = common_of_parts((state.epoch, state.sequence, ticket, step, layer), part, signature)
    frame = b"".join((state.sender, after, part.data))
    nbytes = len(frame)
    if nbytes > mesh.max_bytes:
        return Rest(others)
    for sent, rank in enumerate(others):
        if not mesh.send(rank, frame):
            return Rest(others[sent:])
    if monotonic() - state.swapped > PAUSE_SECONDS:
        sched_yield()
    senders, start = state.senders, SENDER_BYTES + len(after)
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
    state.sequence += 1
    state.swapped = monotonic()
    return None

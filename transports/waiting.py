"""Checks of whether a rank should keep waiting for other ranks in an exchange."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Protocol

from moesched.errors import RankLost, TransportError

from .inbox import Inbox
from .mesh import Mesh

CLOSED = "the transport was closed"


class TransportState(Protocol):
    """The state of a rank's transport, as far as its exchanges use it.

    Attributes:
        sender: the first bytes of this rank's frames in an all-reduce.
        senders: the other ranks, by the first bytes of their frames.
        calling: the lock that the exchange in progress holds.
        sequence: number of exchanges so far.
        swapped: the time at which the last all-reduce of small parts ended, on the monotonic clock.
    """

    rank: int
    epoch: int
    others: tuple[int, ...]
    sender: bytes
    senders: Mapping[bytes, int]
    closed: bool
    timeout_seconds: float
    mesh: Mesh
    inbox: Inbox
    calling: threading.Lock
    sequence: int
    swapped: float


def check_waiting(state: TransportState, missing: set[int], sequence: int, until: float) -> None:
    """Check that the missing ranks can still come to an exchange.

    Args:
        state: the state of this rank's transport.
        missing: numbers of the ranks that have not come.
        sequence: number of the exchange.
        until: the end of the timeout, in seconds of the monotonic clock.

    Raises:
        RankLost: one of the missing ranks is lost.
        TransportError: one of them went on to another exchange, the timeout is over, or the transport was closed.
    """
    if state.closed:
        raise TransportError(CLOSED)
    for rank in sorted(missing):
        ahead = state.inbox.reached.get(rank)
        if ahead is not None and ahead.sequence > sequence:
            raise TransportError(f"rank {rank} went on without it, to {ahead.describe()}")
    lost = {rank: state.inbox.departed[rank] for rank in sorted(missing) if rank in state.inbox.departed}
    for rank in missing - set(lost):
        if state.mesh.lost(rank):
            lost[rank] = "its connection ended"
    if lost and not state.mesh.poll(0):  # frames that arrived before are read first: they may hold the reason
        said = "; ".join(f"rank {rank} is lost: {why}" for rank, why in sorted(lost.items()))
        raise RankLost(said, tuple(sorted(lost)))
    if time.monotonic() > until:
        raise TransportError(_late(state, missing))


def is_gone(state: TransportState, rank: int) -> bool:
    """Return True if a rank has closed its transport or lost its connection, so that nothing need be sent to it."""
    return rank in state.inbox.departed or state.mesh.lost(rank)


def _late(state: TransportState, missing: set[int]) -> str:
    troubles = {each: state.mesh.trouble(each) for each in sorted(missing)}
    said = "".join(f"; rank {each}: {trouble}" for each, trouble in troubles.items() if trouble)
    ranks = ", ".join(str(each) for each in sorted(missing))
    return f"rank {ranks} did not come in {state.timeout_seconds:g} s{said}"

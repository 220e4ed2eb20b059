"""Collectives between machines over ZeroMQ: encrypted, with a direct connection between every two ranks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from moesched.errors import TransportError
from moesched.seams import Exchange

from .curve import Keys
from .exchange_part import ExchangePart
from .frames import Frame, Kind, pack, sender
from .inbox import Inbox
from .mesh import Mesh
from .straight import Rest, swap
from .sums import pieces, sum_in_order

if TYPE_CHECKING:
    from moesched.seams import Array

WHOLE_UP_TO = 32 * 1024
"""Most bytes of a part that is sent whole. Three or more ranks sum larger parts in pieces: fewer bytes, two hops."""


class ZeroMqTransport:
    """Carries out collectives over a mesh of ZeroMQ sockets, encrypted and authenticated by CURVE.

    Each rank has its own transport, in its own process or on its own thread. Ranks may start in any order: the first
    exchange waits for all of them. Sums are added in the order of the ranks, so that all ranks get the same bits.

    Args:
        addresses: one address for each rank, `tcp://HOST:PORT` or `ipc://PATH`.
        rank: number of this rank, from 0.
        keys: this rank's secret key and all ranks' public keys, in Z85. Without keys nothing is encrypted, which is
            refused unless all addresses are on this machine.
        epoch: number of the period in which these ranks run together; frames of other epochs are refused.
        timeout_seconds: time limit of an exchange.
        listen: the address to bind; None for the rank's own.
        lost_after_seconds: silence after which a machine counts as lost; the end of a process is noticed at once.
        max_bytes: size of the largest frame that is accepted.

    Raises:
        BadInput: an address or a key cannot be used, or the port is in use.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        rank: int,
        *,
        keys: tuple[str, Sequence[str]] | None = None,
        epoch: int = 0,
        timeout_seconds: float = 60.0,
        listen: str | None = None,
        lost_after_seconds: float = 5.0,
        max_bytes: int = 1 << 30,
    ) -> None:
        self.rank = rank
        self.ranks = len(addresses)
        self.epoch = epoch
        self.timeout_seconds = timeout_seconds
        self.others = tuple(each for each in range(self.ranks) if each != rank)
        self.sender = sender(Kind.ALL_REDUCE, rank)
        self.senders: Mapping[bytes, int] = {sender(Kind.ALL_REDUCE, each): each for each in self.others}
        self.closed = self.freed = False
        self.mesh = Mesh(
            addresses,
            rank,
            keys=None if keys is None else Keys(*keys),
            epoch=epoch,
            listen=listen,
            lost_after_seconds=lost_after_seconds,
            max_bytes=max_bytes,
        )
        self.inbox = Inbox(self.mesh)
        self.calling = threading.Lock()
        self.sequence = 0
        self.swapped = 0.0

    def all_reduce(self, rank: int, exchange: Exchange, part: Array) -> Array:
        """Return the sum of all ranks' parts in `exchange`, added in rank order; `rank` is the number of this rank.

        Raises:
            RankLost: a rank's process ended, its machine is silent, or it closed its transport.
            TransportError: a rank did not arrive in time, gave up, or is in another exchange; or the transport was
                closed.
        """
        part = contiguous(part)
        with self.calling:
            parts = {rank: part}
            if part.nbytes <= WHOLE_UP_TO and rank == self.rank and not (self.closed or self.inbox.early):
                try:
                    rest = swap(self, exchange, part, parts)
                except BaseException:
                    with ExchangePart(self, Kind.ALL_REDUCE, rank, exchange, part):
                        raise
                if rest is None:
                    return self._sum(parts)
            else:
                rest = Rest(self.others)
            with ExchangePart(self, Kind.ALL_REDUCE, rank, exchange, part) as own_part:
                if self.ranks > 2 and part.nbytes > WHOLE_UP_TO:
                    return self._sum_in_pieces(own_part, part)
                own_part.go_on(Kind.ALL_REDUCE, parts, rest.message)
                own_part.send(Kind.ALL_REDUCE, rest.unsent, part)
                return self._sum(own_part.receive(Kind.ALL_REDUCE, self.others))

    def broadcast(self, rank: int, exchange: Exchange, array: Array | None, root: int) -> Array:
        """Return the root's array on every rank; the root does not wait for the others. Raises as `all_reduce`.

        Args:
            array: the array to send on the root, None on other ranks.
        """
        with self.calling, ExchangePart(self, Kind.BROADCAST, rank, exchange, array, root) as own_part:
            if rank != root:
                found: Array = own_part.receive(Kind.BROADCAST, (root,))[root].copy()
                return found
            if array is None:
                raise TransportError("the root has nothing to send")
            own_part.send(Kind.BROADCAST, self.others, contiguous(array))
            return array.copy()

    def gather(self, rank: int, exchange: Exchange, part: Array, root: int) -> list[Array] | None:
        """Return all ranks' parts in order on the root, which alone waits; None elsewhere. Raises as `all_reduce`."""
        with self.calling, ExchangePart(self, Kind.GATHER, rank, exchange, part, root) as own_part:
            if rank != root:
                own_part.send(Kind.GATHER, (root,), contiguous(part))
                return None
            parts = own_part.receive(Kind.GATHER, self.others)
            return [part.copy() if each == root else parts[each].copy() for each in range(self.ranks)]

    def abandon(self, rank: int, exchange: Exchange, reason: str) -> None:
        """Tell the other ranks the reason why this rank takes no part in an exchange, so that they do not wait."""
        with self.calling, ExchangePart(self, Kind.ABANDON, rank, exchange) as own_part:
            own_part.abandon(reason)

    async def aclose(self) -> None:
        """Close the transport: a call that waits gets an error, the other ranks are told, and all sockets are freed."""
        await asyncio.to_thread(self._close)

    def _sum(self, parts: Mapping[int, Array]) -> Array:
        return sum_in_order([*map(parts.__getitem__, range(self.ranks))])

    def _sum_in_pieces(self, own_part: ExchangePart, part: Array) -> Array:
        """Return the sum of all ranks' `part`s. Each rank adds up one piece of them, and sends this sum to all others.

        Args:
            own_part: sends and receives the pieces.
        """
        flat = part.reshape(-1)
        cuts = pieces(flat.size, self.ranks)
        for each in self.others:
            own_part.send(Kind.SCATTER, (each,), flat[cuts[each]])
        theirs = own_part.receive(Kind.SCATTER, self.others)
        own = flat[cuts[self.rank]]
        if any(piece.size != own.size for piece in theirs.values()):
            raise TransportError("a rank sent too little")
        mine = self._sum({**theirs, self.rank: own})
        own_part.send(Kind.SUM, self.others, mine)
        total = np.empty_like(flat)
        total[cuts[self.rank]] = mine
        for each, piece in own_part.receive(Kind.SUM, self.others).items():
            total[cuts[each]] = piece
        return total.reshape(part.shape)

    def _close(self) -> None:
        self.closed = True  # a call that waits ends, and releases the lock
        with self.calling:
            if self.freed:
                return
            self.freed = True
            farewell = pack(
                Frame(Kind.LEAVE, Kind.ABANDON, self.rank, self.epoch, text="it closed its transport")
            )
            self.mesh.close(farewell)


def contiguous(array: Array) -> Array:
    """Return the array itself if its elements are contiguous in C order, otherwise a contiguous copy."""
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)

"""An envoy: a separate process that runs a rank's exchanges, joined to it by a socket file (RACS'24, section 4.3).

It keeps communication out of the process that computes. It costs two more hops (docs/transports.md gives the figures).
"""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import zmq

from moesched.errors import BadInput, RankLost, TransportError
from moesched.seams import Exchange
from moesched.system.scratch import new_scratch_folder, remove

from .envoy_process import Orders
from .frames import NAMES, NOTHING, Frame, Kind, pack, unpack

if TYPE_CHECKING:
    from moesched.seams import Array

START_SECONDS = 60.0
SLICE_MILLISECONDS = 50
"""Interval at which a waiting call checks whether the transport was closed."""

END_SECONDS = 10.0
PATIENCE_SECONDS = 10.0
"""Extra time for the envoy to report that an exchange has timed out."""


class EnvoyTransport:
    """Collectives over ZeroMQ, run by a separate process for each rank.

    Args:
        addresses, rank, keys, options: those of the transport `zeromq`.
        timeout_seconds: time limit of an exchange.

    Raises:
        BadInput: as for `zeromq`, or the process does not start.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        rank: int,
        *,
        keys: tuple[str, Sequence[str]] | None = None,
        timeout_seconds: float = 60.0,
        **options: Any,
    ) -> None:
        self.rank = rank
        self.ranks = len(addresses)
        self.timeout_seconds = timeout_seconds
        self._closed = False
        self._calling = threading.Lock()
        self._folder = new_scratch_folder()
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        address = f"ipc://{self._folder / 'envoy'}"
        self._socket.bind(address)
        secret, public = (None, ()) if keys is None else keys
        options = {"timeout_seconds": timeout_seconds, **options}
        orders = Orders(address, list(addresses), rank, secret, list(public), options)
        self._process = subprocess.Popen(
            [sys.executable, "-m", Orders.__module__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._orders, self._reports = self._process.stdin, self._process.stdout
        try:
            self._start(orders)
        except BaseException:
            self._close()
            raise

    def all_reduce(self, rank: int, exchange: Exchange, part: Array) -> Array:
        """The sum of all ranks' parts, added in the order of the ranks.

        Raises:
            RankLost: a rank is lost.
            TransportError: as for `zeromq`, or the envoy ended.
        """
        return self._ask(Kind.ALL_REDUCE, rank, exchange, part)[0]

    def broadcast(self, rank: int, exchange: Exchange, array: Array | None, root: int) -> Array:
        """The root's array. Raises as `all_reduce`."""
        return self._ask(Kind.BROADCAST, rank, exchange, array if rank == root else None, root)[0]

    def gather(self, rank: int, exchange: Exchange, part: Array, root: int) -> list[Array] | None:
        """All ranks' parts in their order, on the root. Raises as `all_reduce`."""
        found = self._ask(Kind.GATHER, rank, exchange, part, root)
        return found if rank == root else None

    def abandon(self, rank: int, exchange: Exchange, reason: str) -> None:
        """Tell the others that a rank takes no part in an exchange, so that they do not wait for the timeout."""
        self._ask(Kind.ABANDON, rank, exchange, np.frombuffer(reason.encode(), np.uint8))

    async def aclose(self) -> None:
        """Wake a waiting call, and end the envoy."""
        await asyncio.to_thread(self._close)

    def _start(self, orders: Orders) -> None:
        """Send the process its orders, and wait until it is ready.

        It reports on its standard output, so that a reason always arrives before the end of the process does.
        """
        with suppress(BrokenPipeError):  # it has ended already: the report says why
            self._orders.write(msgspec.json.encode(orders) + b"\n")
        if not select.select([self._reports], [], [], START_SECONDS)[0]:
            raise BadInput(f"the envoy of rank {self.rank} did not start in {START_SECONDS:g} s")
        report = self._reports.readline()
        problem = msgspec.json.decode(report, type=str) if report else self._how_it_ended()
        if problem:
            raise BadInput(problem)

    def _ask(
        self, operation: Kind, rank: int, exchange: Exchange, part: Array | None, root: int = 0
    ) -> list[Array]:
        """Have the envoy take part in an exchange; returns the resulting arrays."""
        ticket, signature, step, layer = exchange
        kind, array = (Kind.WAITING, NOTHING) if part is None else (operation, np.ascontiguousarray(part))
        shape = () if part is None else part.shape
        with self._calling:
            if self._closed:
                raise TransportError(f"{NAMES[operation]} #{ticket}: the transport was closed")
            asked = Frame(
                kind, operation, rank, 0, 0, ticket, step, layer, root, shape, signature, array.reshape(-1)
            )
            until = time.monotonic() + self.timeout_seconds + PATIENCE_SECONDS
            try:
                self._wait_until_ready(zmq.POLLOUT, until)
                self._socket.send(pack(asked), copy=False)
                self._wait_until_ready(zmq.POLLIN, until)
                return _arrays_of(self._socket.recv_multipart())
            except OverflowError as error:
                raise TransportError(f"{NAMES[operation]} #{ticket}: {error}") from None

    def _wait_until_ready(self, event: int, until: float) -> None:
        """Wait until the socket can send or receive.

        Raises:
            TransportError: the envoy ended or does not answer, or the transport was closed.
        """
        poller = zmq.Poller()
        poller.register(self._socket, event)
        poller.register(self._reports, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(SLICE_MILLISECONDS))
            if self._socket in ready:
                return
            if self._closed:
                raise TransportError("the transport was closed")
            if ready and not os.read(self._reports.fileno(), 4096):
                raise TransportError(self._how_it_ended())
            if time.monotonic() > until:
                raise TransportError(f"the envoy of rank {self.rank} does not answer")

    def _how_it_ended(self) -> str:
        return f"the envoy of rank {self.rank} ended with code {self._process.wait()}"

    def _close(self) -> None:
        closed, self._closed = self._closed, True
        with self._calling:
            if closed:
                return
            self._orders.close()
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._reports.close()
            self._socket.close()
            self._context.term()
            remove(self._folder)


def _arrays_of(answer: list[bytes]) -> list[Array]:
    """The arrays of an envoy's answer.

    Raises:
        RankLost, TransportError: the envoy's exchange raised it.
    """
    *frames, _ = [unpack(part) for part in answer]
    for frame in frames:
        if frame.kind is Kind.ABANDON:
            lost = tuple(int(each) for each in frame.values)
            raise RankLost(frame.text, lost) if lost else TransportError(frame.text)
    return [frame.values.reshape(frame.shape).copy() for frame in frames]

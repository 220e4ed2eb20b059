"""An envoy: a process of its own that exchanges for a rank, joined to it by a socket file (RACS'24, section 4.3).

It keeps the exchanging out of the process that computes. It costs two more hops (docs/transports.md says how much).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import zmq

from moesched.errors import BadInput, RankLost, TransportError
from moesched.seams import Exchange

from .envoy_process import Orders
from .frames import NAMES, NOTHING, Frame, Kind, pack, unpack

if TYPE_CHECKING:
    from moesched.seams import Array

START_SECONDS = 30.0
SLICE_MILLISECONDS = 50
END_SECONDS = 5.0
PATIENCE_SECONDS = 10.0
"""How much longer than an exchange may take its envoy has to say so."""


class EnvoyTransport:
    """Collectives over ZeroMQ by an isolated process of the rank's own.

    Args:
        addresses, rank, keys, options: as of the transport `zeromq`.
        timeout_seconds: how long an exchange may take.

    Raises:
        BadInput: as `zeromq`.
        TransportError: the process does not start.
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
        self._folder = tempfile.TemporaryDirectory(prefix="moesched-envoy-")
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, SLICE_MILLISECONDS)
        address = f"ipc://{Path(self._folder.name) / 'envoy'}"
        self._socket.bind(address)
        secret, public = (None, ()) if keys is None else keys
        options = {"timeout_seconds": timeout_seconds, **options}
        orders = Orders(address, list(addresses), rank, secret, list(public), options)
        self._process = subprocess.Popen(
            [sys.executable, "-m", Orders.__module__], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        try:
            self._start(orders)
        except BaseException:
            self._close()
            raise

    def all_reduce(self, rank: int, exchange: Exchange, part: Array) -> Array:
        """The sum of all ranks' parts, added in the order of the ranks.

        Raises:
            RankLost: a rank is there no more.
            TransportError: as of the transport `zeromq`; the envoy ended.
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
        """Say that a rank takes no part in an exchange, so that the others need not wait for the timeout."""
        self._ask(Kind.ABANDON, rank, exchange, np.frombuffer(reason.encode(), np.uint8))

    async def aclose(self) -> None:
        """Wake the call that waits, and end the envoy."""
        await asyncio.to_thread(self._close)

    def _start(self, orders: Orders) -> None:
        """Tell the process what it is to do, and wait until it can."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended already, which the wait will tell
            self._process.stdin.write(msgspec.json.encode(orders) + b"\n")
            self._process.stdin.flush()
        try:
            self._receive(START_SECONDS)
        except TransportError as error:
            raise BadInput(str(error)) from None

    def _ask(
        self, operation: Kind, rank: int, exchange: Exchange, part: Array | None, root: int = 0
    ) -> list[Array]:
        """Have the envoy take part in an exchange; returns the arrays that come of it."""
        ticket, signature, step, layer = exchange
        kind, array = (Kind.WAITING, NOTHING) if part is None else (operation, np.ascontiguousarray(part))
        shape = () if part is None else part.shape
        with self._calling:
            if self._closed:
                raise TransportError(f"{NAMES[operation]} #{ticket}: the transport was closed")
            asked = Frame(
                kind, operation, rank, 0, 0, ticket, step, layer, root, shape, signature, array.reshape(-1)
            )
            try:
                self._socket.send(pack(asked), copy=False)
                return self._receive(self.timeout_seconds + PATIENCE_SECONDS)
            except OverflowError as error:
                raise TransportError(f"{NAMES[operation]} #{ticket}: {error}") from None

    def _receive(self, seconds: float) -> list[Array]:
        """The arrays of the envoy's answer.

        Raises:
            RankLost, TransportError: that of the envoy; it ended, says nothing, or was closed.
        """
        until = time.monotonic() + seconds
        while True:
            try:
                parts = self._socket.recv_multipart()
                break
            except zmq.Again:
                self._check_alive(time.monotonic() > until)
        *frames, _ = [unpack(part) for part in parts]
        for frame in frames:
            if frame.kind is Kind.ABANDON:
                lost = tuple(int(each) for each in frame.values)
                raise RankLost(frame.text, lost) if lost else TransportError(frame.text)
        return [frame.values.reshape(frame.shape).copy() for frame in frames]

    def _check_alive(self, late: bool) -> None:
        if self._closed:
            raise TransportError("the transport was closed")
        if self._process.poll() is not None:
            raise TransportError(f"the envoy of rank {self.rank} ended with code {self._process.returncode}")
        if late:
            raise TransportError(f"the envoy of rank {self.rank} does not answer")

    def _close(self) -> None:
        closed, self._closed = self._closed, True
        with self._calling:
            if closed:
                return
            if self._process.stdin is not None:
                with suppress(BrokenPipeError):
                    self._process.stdin.close()
            try:
                self._process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._socket.close()
            self._context.term()
            self._folder.cleanup()

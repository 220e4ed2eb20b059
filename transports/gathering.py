"""The base of transports over a communication library, which needs only the library's all-gather of bytes.

Libraries may add in an order that differs between ranks. Here every rank gets all parts and adds them itself, in the
order of the ranks. An exchange begins with an all-gather of headers, so that ranks in different exchanges get an error.
Small arrays come with the headers; larger ones take a second all-gather.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from moesched.errors import TransportError
from moesched.seams import Exchange

from .frames import HEADER, NAMES, NOTHING, TEXT_BYTES, BadFrame, Frame, Kind, pack, unpack
from .sums import sum_in_order

if TYPE_CHECKING:
    from moesched.seams import Array

BESIDE_HEADER = 32 * 1024
"""Largest array, in bytes, that is sent with its header; a token of DBRX has 24 KiB."""
FIRST_BYTES = 4 + HEADER.size + TEXT_BYTES + BESIDE_HEADER
SLICE_SECONDS = 0.05
"""Seconds between a waiting rank's checks whether its transport was closed."""

CLOSED = "the transport was closed"


class GatheringTransport(ABC):
    """Carries out one rank's collectives by a library's all-gather, on a thread, since a call cannot be interrupted.

    Args:
        rank: number of this rank, from 0.
        ranks: number of ranks.
        timeout_seconds: time limit of an exchange.
    """

    def __init__(self, rank: int, ranks: int, *, timeout_seconds: float = 60.0) -> None:
        self.rank = rank
        self.ranks = ranks
        self.timeout_seconds = timeout_seconds
        self._sequence = 0
        self._closed = self._freed = False
        self._freeing = threading.Lock()
        self._broken = ""
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="transport", daemon=True)
        self._thread.start()

    @abstractmethod
    def all_gather(self, data: Array) -> list[Array]:
        """Gather bytes: send `data`, and return all ranks' arrays in rank order; all ranks give equally many bytes.

        Exceptions of the library may pass through.
        """

    @abstractmethod
    def free(self) -> None:
        """Free the library's resources; called once, from any thread."""

    def all_reduce(self, rank: int, exchange: Exchange, part: Array) -> Array:
        """Return the sum of all ranks' parts in `exchange`, added in rank order; `rank` is the number of this rank.

        Raises:
            TransportError: a rank did not arrive in time, is lost, or is in another exchange; or the transport was
                closed.
        """
        return sum_in_order(self._exchange(Kind.ALL_REDUCE, rank, exchange, part, 0))

    def broadcast(self, rank: int, exchange: Exchange, array: Array | None, root: int) -> Array:
        """Return the root's array on every rank; other ranks pass None as `array`. Raises as `all_reduce`."""
        brought = array if rank == root else None
        problem = "the root has nothing to send" if rank == root and array is None else ""
        return self._exchange(Kind.BROADCAST, rank, exchange, brought, root, problem)[root]

    def gather(self, rank: int, exchange: Exchange, part: Array, root: int) -> list[Array] | None:
        """Return all ranks' parts in rank order, on the root; None on the other ranks. Raises as `all_reduce`."""
        parts = self._exchange(Kind.GATHER, rank, exchange, part, root)
        return parts if rank == root else None

    async def aclose(self) -> None:
        """Close the transport: a call that waits gets an error, and the library's resources are freed."""
        self._closed = True
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        with self._freeing:
            if not self._freed:
                self._freed = True
                self._work.put(None)
                self.free()

    def _exchange(
        self, operation: Kind, rank: int, exchange: Exchange, part: Array | None, root: int, problem: str = ""
    ) -> list[Array]:
        """Exchange arrays with all ranks; returns copies of the arrays of all ranks, in order.

        Args:
            part: this rank's array; None if it sends none.
            root: number of the root rank of a broadcast or gather.
            problem: the reason why this rank gives up, which all ranks then raise; empty if it does not.
        """
        where = f"{NAMES[operation]} #{exchange.ticket}"
        if rank != self.rank or not 0 <= root < self.ranks:
            raise TransportError(f"{where}: asked for rank {rank} and root {root} of rank {self.rank}")
        until = time.monotonic() + self.timeout_seconds
        array = NOTHING if part is None else np.ascontiguousarray(part).reshape(part.shape)
        mine = Frame(
            Kind.ABANDON if problem else Kind.WAITING, operation, rank, 0, self._sequence, exchange.ticket,
            exchange.step, exchange.layer, root, array.shape, problem or exchange.signature,
            array.reshape(-1)[: None if array.nbytes <= BESIDE_HEADER else 0],
        )  # fmt: skip
        self._sequence += 1
        try:
            packed = pack(mine)
            first = _padded(FIRST_BYTES, len(packed).to_bytes(4, "little"), packed)
            heads = [_read(data) for data in self._all_gather(first, until)]
            _check_agreement(heads)
            sizes = [prod(head.shape) * head.values.itemsize for head in heads]
            if max(sizes) <= BESIDE_HEADER:
                return [np.array(head.values).reshape(head.shape) for head in heads]
            brought = self._all_gather(_padded(max(sizes), array.reshape(-1).view(np.uint8)), until)
            return [
                np.array(data[:size]).view(head.values.dtype).reshape(head.shape)
                for data, size, head in zip(brought, sizes, heads, strict=True)
            ]
        except TransportError as error:
            raise TransportError(f"{where}: {error}") from None

    def _all_gather(self, data: Array, until: float) -> list[Array]:
        """Call `all_gather(data)` on the library's thread, and wait until the time `until` on the monotonic clock.

        Raises:
            TransportError: the call fails or takes too long, or the transport was closed; later calls then fail, too.
        """
        if self._closed or self._broken:
            raise TransportError(self._broken or CLOSED)
        future: Future[list[Array]] = Future()
        self._work.put((future, lambda: self.all_gather(data)))
        while True:
            wait([future], SLICE_SECONDS)
            self._broken = self._problem(future, until)
            if self._broken:
                raise TransportError(self._broken)
            if future.done():
                return future.result()

    def _problem(self, future: Future[list[Array]], until: float) -> str:
        """Return the reason why a call of the library has failed; empty if the call has succeeded or is still running.

        Args:
            until: the end of the timeout, on the monotonic clock.
        """
        if future.done():
            error = future.exception()
            return "" if error is None else CLOSED if self._closed else _one_line(error)
        if self._closed:
            return CLOSED
        return f"not all ranks came in {self.timeout_seconds:g} s" if time.monotonic() > until else ""

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, gather = item
            try:
                future.set_result(gather())
            except BaseException as error:
                future.set_exception(error)


def _padded(nbytes: int, *parts: Any) -> Array:
    """Return an array of `nbytes` bytes: those of the parts, one after the other, and zeros."""
    padded = np.zeros(nbytes, np.uint8)
    end = 0
    for part in parts:
        start, end = end, end + len(part)
        padded[start:end] = np.frombuffer(part, np.uint8)
    return padded


def _read(data: Array) -> Frame:
    try:
        return unpack(data[4 : 4 + int.from_bytes(data[:4].tobytes(), "little")])
    except BadFrame as error:
        raise TransportError(f"a rank sent an invalid frame: {error}") from None


def _check_agreement(heads: Sequence[Frame]) -> None:
    """Check that no rank gave up, and that the headers of all ranks name the same exchange.

    Raises:
        TransportError: a rank gave up, and the message has its reason; or the headers differ, and the message has all.
    """
    for head in heads:
        if head.kind is Kind.ABANDON:
            raise TransportError(f"rank {head.rank} gave up: {head.text}")
    if not all(heads[0].names_the_same_as(head) for head in heads):
        said = "; ".join(f"rank {head.rank}: {head.describe()}" for head in heads)
        raise TransportError(f"the ranks disagree on it: {said}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__

"""A transport in a process of its own, which keeps exchanges out of the process that computes (RACS'24, section 4.3).

    python examples/envoy_transport.py

Each rank starts such an envoy and calls it over its standard input and output; the envoys exchange by `zeromq`. The
command has two ranks add up their arrays. `--transport examples/envoy_transport.py:EnvoyTransport` uses it for nodes.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

from moesched.errors import BadInput, RankLost, TransportError
from moesched.plugins import find
from moesched.seams import Exchange
from moesched.system.standard_output import command_output, reserve_stdout

Array = npt.NDArray[Any]
LENGTH_BYTES = 8


class Values(msgspec.Struct):
    """An array in a message."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: Array) -> Values:
        return cls(array.dtype.str, array.shape, array.tobytes())

    def array(self) -> Array:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape).copy()


class Start(msgspec.Struct):
    """The first message: the arguments of `zeromq`. It comes by a pipe, since others can read a command's arguments."""

    addresses: list[str]
    rank: int
    keys: tuple[str, list[str]] | None
    options: dict[str, Any]


class Call(msgspec.Struct):
    """A call of the transport; `last` is its last argument, a root or a reason."""

    operation: str
    rank: int
    exchange: Exchange
    values: Values | None
    last: int | str | None = None


class Answer(msgspec.Struct):
    """The arrays that a call returned, or its error with the ranks that are lost."""

    arrays: list[Values] = []
    error: str = ""
    lost: tuple[int, ...] = ()


class EnvoyTransport:
    """Collectives over ZeroMQ, run by a separate process for each rank.

    Args:
        addresses, rank, keys, options: those of the transport `zeromq`.

    Raises:
        BadInput: as for `zeromq`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        rank: int,
        *,
        keys: tuple[str, Sequence[str]] | None = None,
        **options: Any,
    ) -> None:
        self.rank, self.ranks = rank, len(addresses)
        self._calling = threading.Lock()
        self.process = subprocess.Popen(
            [sys.executable, __file__, "envoy"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        public = None if keys is None else (keys[0], list(keys[1]))
        try:
            self._ask(Start(list(addresses), rank, public, options))
        except TransportError as error:
            self._close()
            raise BadInput(str(error)) from None

    def all_reduce(self, rank: int, exchange: Exchange, part: Array) -> Array:
        """The sum of all ranks' parts, in their order."""
        return self._ask(Call("all_reduce", rank, exchange, Values.of(part)))[0]

    def broadcast(self, rank: int, exchange: Exchange, array: Array | None, root: int) -> Array:
        """Return the root's array, on every rank."""
        sent = None if array is None or rank != root else Values.of(array)
        return self._ask(Call("broadcast", rank, exchange, sent, root))[0]

    def gather(self, rank: int, exchange: Exchange, part: Array, root: int) -> list[Array] | None:
        """Return all ranks' parts on the root; None on the others."""
        parts = self._ask(Call("gather", rank, exchange, Values.of(part), root))
        return parts if rank == root else None

    def abandon(self, rank: int, exchange: Exchange, reason: str) -> None:
        """Tell the others that a rank takes no part in an exchange."""
        self._ask(Call("abandon", rank, exchange, None, reason))

    async def aclose(self) -> None:
        """End the envoy, and with it a call that waits."""
        await asyncio.to_thread(self._close)

    def _ask(self, message: Start | Call) -> list[Array]:
        """Have the envoy do something.

        Raises:
            RankLost, TransportError: its transport raised it, or the envoy ended.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        with self._calling:
            answer = b""
            with suppress(OSError, ValueError):  # the envoy has ended, or the transport is closed
                send(self.process.stdin, message)
                answer = receive(self.process.stdout)
        if not answer:
            ended = self.process.wait()
            raise TransportError(f"the envoy of rank {self.rank} ended with code {ended}: see its log")
        told = msgspec.msgpack.decode(answer, type=Answer)
        if told.error:
            raise RankLost(told.error, told.lost) if told.lost else TransportError(told.error)
        return [each.array() for each in told.arrays]

    def _close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def send(pipe: IO[bytes], message: msgspec.Struct) -> None:
    """Send a message behind its length."""
    data = msgspec.msgpack.encode(message)
    left = memoryview(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    while left:
        left = left[pipe.write(left) :]


def receive(pipe: IO[bytes]) -> bytes:
    """Receive a message; empty at the end of the pipe."""
    return read(pipe, int.from_bytes(read(pipe, LENGTH_BYTES), "little"))


def read(pipe: IO[bytes], nbytes: int) -> bytes:
    """Read this many bytes, or up to the end of the pipe."""
    data = bytearray()
    while len(data) < nbytes and (piece := pipe.read(nbytes - len(data))):
        data += piece
    return bytes(data) if len(data) == nbytes else b""


def envoy() -> None:
    """Exchange for the rank that started this process, until it closes the pipe."""
    reserve_stdout()
    calls, answers = sys.stdin.buffer, command_output().buffer
    start = msgspec.msgpack.decode(receive(calls), type=Start)
    try:
        transport = find("transports", "zeromq")(
            start.addresses, start.rank, keys=start.keys, **start.options
        )
    except BadInput as error:
        send(answers, Answer(error=str(error)))
        answers.flush()
        return
    send(answers, Answer())
    answers.flush()
    messages: list[bytes] = []
    arrived = threading.Condition()

    def listen() -> None:
        """Collect calls; at the end of the pipe, wake the call that waits by closing the transport."""
        message = receive(calls)
        while message:
            with arrived:
                messages.append(message)
                arrived.notify()
            message = receive(calls)
        asyncio.run(transport.aclose())
        with arrived:
            messages.append(b"")
            arrived.notify()

    threading.Thread(target=listen, daemon=True).start()
    while True:
        with arrived:
            arrived.wait_for(lambda: messages)
            message = messages.pop(0)
        if not message:
            return
        send(answers, answered(transport, msgspec.msgpack.decode(message, type=Call)))
        answers.flush()


def answered(transport: Any, call: Call) -> Answer:
    """Make a call of the transport."""
    values = () if call.operation == "abandon" else (None if call.values is None else call.values.array(),)
    last = () if call.last is None else (call.last,)
    try:
        found = getattr(transport, call.operation)(call.rank, call.exchange, *values, *last)
    except TransportError as error:
        return Answer(error=str(error), lost=error.ranks if isinstance(error, RankLost) else ())
    arrays = [found] if isinstance(found, np.ndarray) else found or []
    return Answer([Values.of(each) for each in arrays])


def main() -> None:
    """Add up the arrays of two ranks."""
    with TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        addresses = [f"ipc://{Path(folder) / str(rank)}" for rank in range(2)]
        ranks = list(pool.map(lambda rank: EnvoyTransport(addresses, rank), range(2)))
        parts = [np.array([rank, 10.0]) for rank in range(2)]
        sums = pool.map(lambda each: each.all_reduce(each.rank, Exchange(0), parts[each.rank]), ranks)
        for rank, total in enumerate(sums):
            print(f"rank {rank} has {parts[rank]} and gets {total}")
        for each in ranks:
            asyncio.run(each.aclose())


if __name__ == "__main__":
    envoy() if sys.argv[1:] == ["envoy"] else main()

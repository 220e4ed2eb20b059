"""The process of an envoy: it takes a rank's calls from a socket file, and exchanges with the other ranks.

It ends when its standard input is closed, and so with the process that started it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import zmq

from moesched.errors import RankLost, TransportError
from moesched.seams import Exchange
from moesched.system.standard_output import command_output, reserve_stdout

from .curve import Keys
from .frames import NOTHING, Frame, Kind, pack, unpack
from .zeromq import ZeroMqTransport

if TYPE_CHECKING:
    from moesched.seams import Array

SLICE_MILLISECONDS = 50


class Orders(msgspec.Struct):
    """An envoy's settings, sent over its standard input: others on the machine can read a command's arguments."""

    socket: str
    addresses: list[str]
    rank: int
    secret: str | None
    public: list[str]
    options: dict[str, Any]


def main() -> None:
    """Report on standard output whether the envoy can start; then exchange until the standard input ends."""
    reserve_stdout()
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)
    context: zmq.Context[Any] = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    try:
        socket.connect(orders.socket)
        keys = None if orders.secret is None else Keys(orders.secret, orders.public)
        transport = ZeroMqTransport(orders.addresses, orders.rank, keys=keys, **orders.options)
    except Exception as error:
        _report(str(error) or type(error).__name__)
    else:
        _report("")
        working = threading.Thread(target=_work, args=(socket, transport))
        working.start()
        sys.stdin.buffer.read()
        asyncio.run(transport.aclose())
        working.join()
    context.destroy(linger=0)


def _report(problem: str) -> None:
    """Say what is wrong, in one line of JSON; an empty text says that the envoy is ready."""
    command_output().buffer.write(msgspec.json.encode(problem) + b"\n")
    command_output().buffer.flush()


def _work(socket: zmq.Socket[bytes], transport: ZeroMqTransport) -> None:
    """Answer one call after the other, until the transport is closed."""
    socket.setsockopt(zmq.RCVTIMEO, SLICE_MILLISECONDS)
    while not transport.closed:
        try:
            received = socket.recv()
        except zmq.Again:
            continue
        try:
            answer: Any = _run(transport, unpack(received))
        except Exception as error:
            answer = error
        _answer(socket, transport.rank, answer)


def _run(transport: ZeroMqTransport, asked: Frame) -> list[Array]:
    exchange = Exchange(asked.ticket, asked.text, asked.step, asked.layer)
    array = None if asked.kind is Kind.WAITING else asked.values.reshape(asked.shape)
    if asked.operation is Kind.BROADCAST:
        return [transport.broadcast(asked.rank, exchange, array, asked.root)]
    if array is None:
        raise TransportError("the rank brought no array")
    if asked.operation is Kind.ALL_REDUCE:
        return [transport.all_reduce(asked.rank, exchange, array)]
    if asked.operation is Kind.GATHER:
        return transport.gather(asked.rank, exchange, array, asked.root) or []
    transport.abandon(asked.rank, exchange, array.tobytes().decode())
    return []


def _answer(socket: zmq.Socket[bytes], rank: int, answer: list[Array] | Exception) -> None:
    """Send the arrays that a call returned, or its error, with the ranks that are lost."""
    if isinstance(answer, Exception):
        lost = np.array(answer.ranks if isinstance(answer, RankLost) else (), np.int64)
        failed = Frame(Kind.ABANDON, Kind.ABANDON, rank, shape=lost.shape, text=str(answer), values=lost)
        frames = [failed]
    else:
        frames = [
            Frame(Kind.GATHER, Kind.GATHER, rank, shape=array.shape, values=array.reshape(-1))
            for array in answer
        ]
    done = Frame(Kind.WAITING, Kind.ABANDON, rank, values=NOTHING)
    socket.send_multipart([pack(frame) for frame in (*frames, done)])


if __name__ == "__main__":
    main()

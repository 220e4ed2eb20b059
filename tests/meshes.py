"""Ranks over ZeroMQ for tests: their addresses, their keys, and threads that call them at once."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from moesched.seams import Exchange, Transport
from moesched.transports.curve import Keys
from moesched.transports.frames import Frame, Kind, pack
from moesched.transports.zeromq import ZeroMqTransport
from patience import PATIENCE_SECONDS

ONE = np.ones(1, np.float32)
FIRST = Exchange(0)
GREETING = pack(Frame(Kind.HERE, Kind.ABANDON, 1))
"""The first frame of rank 1 on its connection."""

_numbers = itertools.count()
_random = random.SystemRandom()
_given: set[int] = set()


def sockets_in(folder: Path, ranks: int) -> list[str]:
    """Addresses of socket files that nobody used before."""
    mesh = next(_numbers)
    return [f"ipc://{folder}/{mesh}-{rank}" for rank in range(ranks)]


def ports(ranks: int) -> list[str]:
    """Addresses of this machine that nobody listens at."""
    return [f"tcp://127.0.0.1:{free_port()}" for _ in range(ranks)]


def free_port() -> int:
    """A port that nobody uses, another one each time, of those that the system gives to nobody by itself meanwhile."""
    while True:
        port = _random.randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _given:
                _given.add(port)
                return port


def keys_of(ranks: int) -> list[Keys]:
    """New keys, one set for each rank."""
    pairs = [tuple(key.decode() for key in zmq.curve_keypair()) for _ in range(ranks)]
    return [Keys(secret, [public for public, _ in pairs]) for _, secret in pairs]


def mesh_of(addresses: Sequence[str], *, keys: Sequence[Keys] | None = None, **options: Any) -> list[Any]:
    """The transports of all ranks."""
    return [
        ZeroMqTransport(addresses, rank, keys=None if keys is None else keys[rank], **options)
        for rank in range(len(addresses))
    ]


@contextmanager
def closing(transports: Iterable[Transport]) -> Iterator[list[Any]]:
    """Close them at the end."""
    opened = list(transports)
    try:
        yield opened
    finally:
        for transport in opened:
            asyncio.run(transport.aclose())


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """Results or errors of calls, each on a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as threads:
        running = [threads.submit(call) for call in calls]
        return [each.exception(PATIENCE_SECONDS) or each.result() for each in running]


def sums(transports: Sequence[Transport], exchange: Exchange = FIRST, part: Any = ONE) -> list[Any]:
    """Result or error of each rank's all-reduce."""
    return at_once(*(partial(each.all_reduce, rank, exchange, part) for rank, each in enumerate(transports)))


def from_rank_1(**changes: Any) -> Any:
    """The bytes of a frame that rank 1 might send in the first exchange."""
    frame = Frame(Kind.ALL_REDUCE, Kind.ALL_REDUCE, 1, shape=(1,), values=ONE)
    return pack(msgspec.structs.replace(frame, **changes))

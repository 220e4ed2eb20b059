"""Frames damaged at random, sent to a rank over ZeroMQ while it takes part in exchanges: not one may do anything.

Half of them come from a rank that has a key, over its own connection, half from a stranger to ranks without keys. After
every 100 frames the ranks exchange, and the sum has to be right. Then bytes that are no ZeroMQ are sent to the ports.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random
from typing import Any

import numpy as np
import structlog
import zmq

from benchmarks.record.benchmark import Benchmark, progress
from benchmarks.record.claims import Claim, Result
from fuzzed_frames import fuzzed_frames
from meshes import keys_of, mesh_of, ports, sums
from moesched.seams import Exchange

BATCH = 100
CONNECTIONS = 100


SENDERS = ("from a rank with a key", "from a stranger")


def claims(result: Result) -> Iterator[Claim]:
    """Damaged frames: the benchmark ends with an error if one changes anything."""
    senders = [each for each in result.values() if isinstance(each, dict) and "frames" in each]
    frames = sum(each["frames"] for each in senders)
    exchanges = sum(each["exchanges"] for each in senders)
    yield Claim(
        f"exchanges between {frames:,} damaged frames, each checked", f"{exchanges}", "none wrong", True
    )


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=SENDERS,
    by_machine=False,
    rounds=5000,
    rounds_help="damaged frames of each sender",
)
BENCHMARK.parser.add_argument("--seed", type=int, default=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Send all frames and write what came of them."""
    options = BENCHMARK.parse(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    result = {}
    for sender in options.only:
        with progress.status(f"sending frames {sender}"):
            number = SENDERS.index(sender)
            frames = fuzzed_frames(options.rounds, options.seed + number)
            result[sender] = fuzz(frames, keyed=number == 0)
    return BENCHMARK.write(result)


def fuzz(frames: Iterator[bytes], *, keyed: bool) -> dict[str, Any]:
    """Send frames in batches, each followed by an exchange, then noise over bare connections.

    Raises:
        AssertionError: a sum was wrong.
    """
    addresses = ports(2)
    ranks = mesh_of(addresses, keys=keys_of(2) if keyed else None, timeout_seconds=30.0)
    context: zmq.Context[Any] = zmq.Context()
    stranger: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    stranger.connect(addresses[0])
    began, sent, exchanges = time.perf_counter(), 0, 0
    try:
        exchanges += _exchange(ranks, exchanges)
        while batch := list(islice(frames, BATCH)):
            for data in batch:
                while not (ranks[1].mesh.send(0, data) if keyed else _give(stranger, data)):
                    _listen(ranks[0])
            sent += len(batch)
            exchanges += _exchange(ranks, exchanges)
        for data in fuzzed_frames(CONNECTIONS, 7):
            _connect_and_send(addresses[0], data)
        exchanges += _exchange(ranks, exchanges)
        refused = ranks[0].mesh.watch.refused
    finally:
        context.destroy(linger=0)
        for rank in ranks:
            asyncio.run(rank.aclose())
    seconds = time.perf_counter() - began
    return {
        "frames": sent,
        "connections": CONNECTIONS,
        "refused": refused,
        "exchanges": exchanges,
        "seconds": seconds,
    }


def _exchange(ranks: Sequence[Any], ticket: int) -> int:
    part = np.arange(6, dtype=np.float32)
    for total in sums(ranks, Exchange(ticket), part):
        assert np.array_equal(total, 2 * part), f"exchange {ticket}: {total}"
    return 1


def _give(stranger: zmq.Socket[bytes], data: bytes) -> bool:
    try:
        stranger.send(data, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


def _listen(rank: Any) -> None:
    """Let a rank that is in no exchange read a frame, as it would at the beginning of its next one."""
    message = rank.mesh.receive()
    if message is not None:
        rank.mesh.read(message)


def _connect_and_send(address: str, data: bytes) -> None:
    host, port = address.removeprefix("tcp://").split(":")
    choose = Random(len(data))
    with socket.create_connection((host, int(port))) as connection:
        greeting = b"\xff" + bytes(8) + b"\x7f" if choose.random() < 0.5 else b""
        connection.sendall(greeting + data)


if __name__ == "__main__":
    sys.exit(main())

"""The transports that all_reduce.py puts beside each other, and how one rank of two measures them."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import grpc
import numpy as np
import torch.distributed
import uvloop
import zmq

from benchmarks.record.results import ROOT
from moesched.drivers.realtime import RealtimeDriver, SharedEngine
from moesched.machines.networks import NETWORK
from moesched.plugins import find
from moesched.seams import Exchange, Transport
from moesched.tasks import Block, Collective, Kernel, Lane, Task
from moesched.work import Work

VALUES = 6144
LAYERS, COMPUTE_SECONDS, TOKENS, TOKEN_ROUNDS = 40, 200e-6, 12, 4
dist: Any = torch.distributed
HOST = "127.0.0.1"
CASES = [
    *(
        f"zeromq, {keys}, {how}"
        for keys in ("CURVE", "plain")
        for how in ("in the engine, submitted", "in the engine, awaited", "called")
    ),
    "bare zeromq, CURVE",
    "bare zeromq, plain",
    "envoy, CURVE",
    "grpc",
    "gloo",
]
NOTHING = Work("nothing", "none")
ENVOY = f"{ROOT / 'examples' / 'envoy_transport.py'}:EnvoyTransport"


class Setup(NamedTuple):
    """Setup that both ranks get.

    Attributes:
        keys: public and secret key of each rank.
        exchanges, rounds: how many turns each transport has, of how many exchanges.
        only: cases that take part.
    """

    ports: list[int]
    keys: list[Any]
    exchanges: int
    rounds: int
    only: tuple[str, ...]


class Case(Protocol):
    """One row of the table."""

    def run(self, exchanges: int) -> list[float]:
        """The seconds of that many all-reduces, one after the other."""


def measure(setup: Setup, rank: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Take all transports in turns; returns the seconds of exchanges, and the overheads of tokens."""
    ports = iter(zip(setup.ports[::2], setup.ports[1::2], strict=True))
    part = np.full((1, VALUES), rank + 1, np.float32)
    cases: dict[str, Case] = {}
    ours = {
        name: Counted(zeromq("zeromq", keys, rank, next(ports)), rank, part)
        for name, keys in (("CURVE", setup.keys), ("plain", None))
    }
    for name, transport in ours.items():
        cases[f"zeromq, {name}, in the engine, submitted"] = InEngine(transport, awaited=False)
        cases[f"zeromq, {name}, in the engine, awaited"] = InEngine(transport, awaited=True)
        cases[f"zeromq, {name}, called"] = transport
    ours["envoy"] = Counted(zeromq(ENVOY, setup.keys, rank, next(ports)), rank, part)
    ours["gloo"] = Counted(gloo(rank, next(ports)[0]), rank, part)
    bare = {
        "CURVE": BareZeroMq(rank, next(ports), part, setup.keys),
        "plain": BareZeroMq(rank, next(ports), part, None),
    }
    cases |= {f"bare zeromq, {name}": case for name, case in bare.items()}
    cases["envoy, CURVE"] = ours["envoy"]
    cases["grpc"] = Grpc(rank, next(ports), part)
    cases["gloo"] = ours["gloo"]
    cases = {name: case for name, case in cases.items() if name in setup.only}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(setup.rounds):
        for name, case in cases.items():
            seconds[name] += case.run(setup.exchanges)[setup.exchanges // 10 :]
    tokens: dict[str, list[float]] = defaultdict(list)
    for _ in range(TOKEN_ROUNDS):
        for name, sockets in bare.items():
            tokens[f"zeromq, {name}"] += token_overheads(ours[name])
            tokens[f"bare zeromq, {name}"] += bare_token_overheads(sockets)
    for transport in ours.values():
        asyncio.run(transport.transport.aclose())
    return seconds, dict(tokens)


# -- ours ------------------------------------------------------------------------------------------


class Counted:
    """A transport that is called, exchange after exchange."""

    def __init__(self, transport: Transport, rank: int, part: Any) -> None:
        self.transport = transport
        self.rank = rank
        self.part = part
        self.total = part
        self.ticket = 0

    def reduce(self) -> Any:
        """One all-reduce."""
        exchange = Exchange(self.ticket, "all_reduce hidden (1, 6144) float32", 0, self.ticket % LAYERS)
        self.ticket += 1
        return self.transport.all_reduce(self.rank, exchange, self.part)

    def leave_sum(self) -> None:
        """The same as a device does it: the sum is left for the next task, instead of the one before."""
        self.total = self.reduce()

    def run(self, exchanges: int) -> list[float]:
        """The seconds of that many."""
        return timed(self.reduce, exchanges)


class InEngine:
    """The same on the network lane of the real-time driver."""

    def __init__(self, transport: Counted, *, awaited: bool) -> None:
        self.transport = transport
        self.awaited = awaited

    def run(self, exchanges: int) -> list[float]:
        """The seconds from each exchange's end to the next one's."""
        engine = SharedEngine([Lane(NETWORK, "in_order")])
        ends: list[float] = []

        async def main() -> None:
            (lane,), block = engine.lanes, Block("hidden")
            tasks = []
            for _ in range(exchanges + 1):
                tasks.append(engine.collective(Collective(lane, NOTHING, "all_reduce"), (block,), (block,)))
                if self.awaited:
                    await tasks[-1]
                    ends.append(time.perf_counter())
            await tasks[-1]
            if not self.awaited:
                ends.extend(task.end * 1e-9 for task in tasks)

        in_driver(engine, lambda task: self.transport.leave_sum(), main())
        return [after - before for before, after in pairwise(ends)]


def token_overheads(transport: Counted) -> list[float]:
    """Seconds of a token beyond the products of its layers, for some tokens."""
    lanes = Lane("gpu", "in_order"), Lane(NETWORK, "in_order")
    engine, block = SharedEngine(lanes), Block("hidden")
    overheads: list[float] = []

    def execute(task: Task) -> None:
        if isinstance(task, Collective):
            transport.leave_sum()
        else:
            compute()

    async def main() -> None:
        for _ in range(TOKENS + 1):
            tasks: list[Task] = []
            for _ in range(LAYERS):
                tasks.append(engine.submit(Kernel(lanes[0], NOTHING, "experts"), (block,), (block,)))
                tasks.append(
                    engine.collective(Collective(lanes[1], NOTHING, "all_reduce"), (block,), (block,))
                )
            await tasks[-1]
            busy = sum(task.end - task.start for task in tasks[::2])
            overheads.append((tasks[-1].end - tasks[0].start - busy) * 1e-9)

    in_driver(engine, execute, main())
    return overheads[1:]


def compute() -> None:
    """Products for 200 µs."""
    until = time.perf_counter() + COMPUTE_SECONDS
    while time.perf_counter() < until:
        np.dot(_MATRIX, _MATRIX)


_MATRIX = np.ones((64, 64), np.float32)


def in_driver(engine: SharedEngine, execute: Callable[[Task], Any], main: Coroutine[Any, Any, None]) -> None:
    """Run one engine under the real-time driver, on uvloop."""

    async def run() -> None:
        await RealtimeDriver([engine], execute, kinds={NETWORK: "guest"}).run(main)

    uvloop.run(run())


def zeromq(name: str, pairs: Any, rank: int, ports: Sequence[int]) -> Transport:
    """The transport of that name; plain without pairs of keys."""
    keys = pairs and (pairs[rank][1], [public for public, _ in pairs])
    made: Transport = find("transports", name)([f"tcp://{HOST}:{port}" for port in ports], rank, keys=keys)
    return made


def gloo(rank: int, port: int) -> Transport:
    """The transport `torch_distributed` over gloo."""
    store = dist.TCPStore(HOST, port, 2, rank == 0, timedelta(seconds=30))
    made: Transport = find("transports", "torch_distributed")(rank, 2, store=store)
    return made


# -- others ----------------------------------------------------------------------------------------


class BareZeroMq:
    """Two DEALERs and nothing else."""

    def __init__(self, rank: int, ports: Sequence[int], part: Any, keys: Any) -> None:
        self.part = part
        self.socket: Any = zmq.Context.instance().socket(zmq.DEALER)
        if keys:
            public, secret = keys[rank]
            self.socket.curve_publickey, self.socket.curve_secretkey = public.encode(), secret.encode()
            if rank == 0:
                self.socket.setsockopt(zmq.CURVE_SERVER, 1)
            else:
                self.socket.curve_serverkey = keys[0][0].encode()
        address = f"tcp://{HOST}:{ports[0]}"
        if rank == 0:
            self.socket.bind(address)
        else:
            self.socket.connect(address)

    def reduce(self) -> Any:
        """One all-reduce."""
        self.socket.send(self.part)
        return self.part + np.frombuffer(self.socket.recv(copy=False).buffer, np.float32)

    def run(self, exchanges: int) -> list[float]:
        """The seconds of that many."""
        return timed(self.reduce, exchanges)


def bare_token_overheads(sockets: BareZeroMq) -> list[float]:
    """Seconds of a token beyond the products of its layers, without engine, for some tokens."""
    overheads = []
    for _ in range(TOKENS + 1):
        began = time.perf_counter()
        busy = 0.0
        for _ in range(LAYERS):
            busy += timed(compute, 1)[0]
            sockets.reduce()
        overheads.append(time.perf_counter() - began - busy)
    return overheads[1:]


class Grpc:
    """grpc.aio: each rank serves, and calls the other with its part."""

    METHOD = "/moesched.Exchange/Give"

    def __init__(self, rank: int, ports: Sequence[int], part: Any) -> None:
        self.part = part
        self.loop = asyncio.new_event_loop()
        self.came: asyncio.Queue[bytes] = asyncio.Queue()
        self.loop.run_until_complete(self._open(ports[rank], ports[1 - rank]))

    async def _open(self, mine: int, other: int) -> None:
        self.server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(self._take)
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("moesched.Exchange", {"Give": handler}),)
        )
        self.server.add_insecure_port(f"{HOST}:{mine}")
        await self.server.start()
        self.channel = grpc.aio.insecure_channel(f"{HOST}:{other}")
        self.give = self.channel.unary_unary(self.METHOD)

    async def _take(self, part: bytes, context: Any) -> bytes:
        self.came.put_nowait(part)
        return b""

    async def _reduce(self) -> Any:
        call = self.give(self.part.tobytes(), wait_for_ready=True)
        found = await self.came.get()
        await call
        return self.part + np.frombuffer(found, np.float32)

    async def _run(self, exchanges: int) -> list[float]:
        seconds = []
        for _ in range(exchanges):
            began = time.perf_counter()
            await self._reduce()
            seconds.append(time.perf_counter() - began)
        return seconds

    def run(self, exchanges: int) -> list[float]:
        """The seconds of that many."""
        return self.loop.run_until_complete(self._run(exchanges))


def timed(call: Callable[[], Any], times: int) -> list[float]:
    """Seconds of each of several calls."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds

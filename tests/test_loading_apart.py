"""Nodes whose disks differ: the first exchange, which has a time limit, waits until all have loaded their weights."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import numpy as np
import pytest

from clusters import cluster
from moesched.cluster.launcher import Launch
from moesched.cluster.messages import Done, Loaded, Prepared, Tokens
from moesched.cluster.metered import Metered
from moesched.cluster.roster import Node
from moesched.cluster.token_log import TokenLog
from moesched.errors import TransportError
from moesched.inputs.options import SizeOptions
from moesched.seams import Abandons, Exchange
from moesched.testing.transport_checks import check_transport
from moesched.transports.inproc import InprocTransport
from patience import PATIENCE_SECONDS
from test_roster import FakeProcess

PART = np.ones(3, np.float32)


class ScriptedRoster:
    """Nodes that say what a script says, and a log of that and of what they are told."""

    def __init__(self, *script: tuple[int, Any]) -> None:
        self.nodes = [Node(host, FakeProcess()) for host in cluster().hosts]
        for node in self.nodes:
            node.peer = b"connected"
        self.members: list[Node] = []
        self.log: list[tuple[str, int, str]] = []
        self._script = deque(script)

    def hear(self, seconds: float) -> Iterator[tuple[Node, Any]]:
        rank, message = self._script.popleft()
        self.log.append(("heard", rank, type(message).__name__))
        yield self.nodes[rank], message

    def say(self, node: Node, message: Any) -> None:
        self.log.append(("said", node.host.rank, type(message).__name__))

    def look_after(self) -> None:
        pass


def prepared(port: int) -> Prepared:
    return Prepared(epoch=0, order=0, port=port, sizes=SizeOptions(), placement=[[0], [1]])


def test_all_nodes_are_told_to_exchange_once_the_slowest_has_loaded() -> None:
    roster: Any = ScriptedRoster(
        (0, prepared(1)),
        (1, prepared(2)),
        (0, Loaded(epoch=0, order=0)),
        (1, Loaded(epoch=0, order=0)),
        (0, Tokens(epoch=0, order=0, place=0, tokens={0: [7]})),
        (0, Done(epoch=0, order=0, digest="same")),
        (1, Done(epoch=0, order=0, digest="same")),
    )
    Launch(roster, TokenLog([[1]], 1, []), SizeOptions()).run()
    first = roster.log.index(("heard", 0, "Loaded"))
    assert roster.log[first : first + 5] == [
        ("heard", 0, "Loaded"),
        ("heard", 1, "Loaded"),
        ("said", 0, "AllLoaded"),
        ("said", 1, "AllLoaded"),
        ("heard", 0, "Tokens"),
    ]


class Impatient(InprocTransport):
    """A transport of one rank that waits for nobody."""

    others_came = False

    def all_reduce(self, rank: int, exchange: Exchange, part: Any) -> Any:
        if not self.others_came:
            raise TransportError("the others did not come in 0 s")
        return super().all_reduce(rank, exchange, part)


def test_a_node_that_has_loaded_first_does_not_wait_within_an_exchange() -> None:
    transport, loaded = Impatient(), Event()
    metered = Metered(transport, loaded.set)
    with ThreadPoolExecutor(1) as thread:
        exchange = thread.submit(metered.all_reduce, 0, Exchange(0), PART)
        assert loaded.wait(PATIENCE_SECONDS)
        transport.others_came = True
        metered.begin()
        assert np.array_equal(exchange.result(PATIENCE_SECONDS), PART)
    assert np.array_equal(metered.all_reduce(0, Exchange(1), PART), PART)
    asyncio.run(metered.aclose())


def test_a_nodes_transport_keeps_the_promises_of_the_one_that_it_wraps() -> None:
    def begun(ranks: int) -> list[Metered]:
        metered = Metered(InprocTransport(ranks), lambda: None)
        metered.begin()
        return [metered] * ranks

    assert isinstance(begun(1)[0], Abandons)
    check_transport(begun)


def test_a_node_that_waits_for_slower_ones_ends_with_its_epoch() -> None:
    loaded = Event()
    metered = Metered(Impatient(), loaded.set)
    with ThreadPoolExecutor(1) as thread:
        exchange = thread.submit(metered.all_reduce, 0, Exchange(0), PART)
        assert loaded.wait(PATIENCE_SECONDS)
        metered.stop("node 1 is lost")
        with pytest.raises(TransportError, match="node 1 is lost"):
            exchange.result(PATIENCE_SECONDS)

"""Strangers, strange frames, and frames and messages that are sent again are refused or dropped."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from clusters import LAUNCHER, NODES, cluster
from fuzzed_frames import fuzzed_frames
from meshes import FIRST, ONE, closing, from_rank_1, keys_of, mesh_of, ports, sockets_in, sums
from moesched.cluster.control import Control
from moesched.cluster.control_link import ControlLink
from moesched.cluster.curve.zap import LOGGED
from moesched.cluster.messages import (
    PROTOCOL,
    AllLoaded,
    JoinRequest,
    Loading,
    Message,
    Ping,
    Quit,
    Serials,
    Stop,
    Tokens,
    Welcome,
    pack,
)
from moesched.cluster.node_jobs import NodeRun
from moesched.seams import Exchange
from moesched.transports.zeromq import ZeroMqTransport
from patience import PATIENCE_SECONDS, wait_until


class Stranger:
    """A socket of ZeroMQ that is no rank's."""

    def __init__(self, address: str, *, server: str = "", pair: tuple[bytes, bytes] | None = None) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if pair:
            self.socket.curve_publickey, self.socket.curve_secretkey = pair
            self.socket.curve_serverkey = server.encode()
        self.socket.connect(address)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def strangers() -> Iterator[Callable[..., Stranger]]:
    made: list[Stranger] = []

    def make(*args: Any, **options: Any) -> Stranger:
        made.append(Stranger(*args, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def refusals_until(count: int, transport: ZeroMqTransport, logs: list[Any]) -> list[Any]:
    """The logged refusals, once that many were counted."""
    wait_until(lambda: transport.mesh.watch.refused >= count, f"{count} refusals")
    return [entry for entry in logs if "refused" in entry["event"]]


@pytest.mark.parametrize("stranger", ["no key", "unknown key", "wrong key of ours", "garbage", "half open"])
def test_strangers_are_sent_away_and_logged_and_the_ranks_go_on(
    stranger: str, strangers: Callable[..., Stranger], monkeypatch: pytest.MonkeyPatch
) -> None:
    if stranger == "half open":
        monkeypatch.setattr("moesched.transports.mesh.HANDSHAKE_MILLISECONDS", 100)
    addresses, keys = ports(2), keys_of(2)
    host, port = addresses[0].removeprefix("tcp://").split(":")
    with closing(mesh_of(addresses, keys=keys)) as ranks, capture_logs() as logs:
        sums(ranks)
        if stranger == "no key":
            strangers(addresses[0])
        elif stranger == "unknown key":
            strangers(addresses[0], server=keys[0].public[0], pair=zmq.curve_keypair())
        elif stranger == "wrong key of ours":
            strangers(addresses[0], server=keys[0].public[1], pair=zmq.curve_keypair())
        else:
            plain = socket.create_connection((host, int(port)))
            if stranger == "garbage":
                plain.sendall(b"\xff" + bytes(8) + b"\x7f\x03" + os.urandom(200))
        refused = refusals_until(1, ranks[0], logs)
        assert [total.tolist() for total in sums(ranks, Exchange(1))] == [[2.0]] * 2
        if stranger in ("garbage", "half open"):
            plain.close()
    assert refused[0]["event"] == "a connection was refused"
    assert refused[0]["address"].startswith((host, "unknown"))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (from_rank_1(epoch=4), "of epoch 4; this is epoch 5"),
        (from_rank_1(epoch=5, rank=0), "from rank 0, which is not one of the others"),
        (from_rank_1(epoch=5, rank=700), "from rank 700, which is not one of the others"),
        (b"GET / HTTP/1.1\r\n", "16 bytes, less than a header"),
        (b"\x80\x04\x95" + bytes(200), r"it begins with b'\x80\x04\x95\x00'"),
        (bytes(from_rank_1(epoch=5))[:-1], "99 bytes for 0 of text and 1 of float32"),
        (b"MoEx\x03" + bytes(from_rank_1(epoch=5))[5:], "version 3 of the wire format; this is version 2"),
    ],
    ids=["epoch", "own rank", "no rank", "too short", "pickle", "too little", "version"],
)
def test_frames_that_are_strange_are_refused_and_logged_with_their_address(
    data: Any, why: str, strangers: Callable[..., Stranger]
) -> None:
    addresses = ports(2)
    with closing(mesh_of(addresses, epoch=5)) as ranks, capture_logs() as logs:
        strangers(addresses[0]).socket.send(data)
        with ThreadPoolExecutor(1) as threads:
            total = threads.submit(ranks[0].all_reduce, 0, FIRST, ONE)
            refused = refusals_until(1, ranks[0], logs)
            assert (
                ranks[1].all_reduce(1, FIRST, ONE).tolist()
                == total.result(PATIENCE_SECONDS).tolist()
                == [2.0]
            )
    assert refused == [
        {"event": "a frame was refused", "why": why, "address": "127.0.0.1", "log_level": "warning"}
    ]


def test_a_stranger_is_sent_nothing(strangers: Callable[..., Stranger]) -> None:
    addresses = ports(2)
    with closing(mesh_of(addresses)) as ranks, capture_logs():
        stranger = strangers(addresses[0]).socket
        for part in (b"several", b"parts"):
            stranger.send_multipart([part] * 3)
        tickets = count()

        def refused_after_a_sum() -> object:
            """Ranks read frames while they exchange; a stranger's may come late."""
            assert [total.tolist() for total in sums(ranks, Exchange(next(tickets)))] == [[2.0]] * 2
            return ranks[0].mesh.watch.refused == 2

        wait_until(refused_after_a_sum, "2 refusals")
        assert not stranger.poll(0)


@pytest.mark.parametrize(("speaker", "hearer", "claimed"), [(2, 0, 1), (0, 2, 1), (2, 1, 0)])
def test_a_rank_cannot_speak_for_another_one(tmp_path: Path, speaker: int, hearer: int, claimed: int) -> None:
    with closing(mesh_of(sockets_in(tmp_path, 3), keys=keys_of(3))) as ranks, capture_logs() as logs:
        sums(ranks)
        forged = from_rank_1(rank=claimed, sequence=1, ticket=1, values=np.full(1, 9, np.float32))
        assert ranks[speaker].mesh.send(hearer, forged)
        assert [total.tolist() for total in sums(ranks, Exchange(1))] == [[3.0]] * 3
        refused = refusals_until(1, ranks[hearer], logs)
        assert refused[0]["why"] == f"from rank {claimed}, with the key of rank {speaker}"


def test_a_frame_that_comes_twice_counts_once(tmp_path: Path) -> None:
    with closing(mesh_of(sockets_in(tmp_path, 3))) as ranks, capture_logs() as logs:
        sums(ranks)
        for _ in range(2):
            assert ranks[1].mesh.send(0, from_rank_1(sequence=1, ticket=1))
        with ThreadPoolExecutor(1) as threads:
            total = threads.submit(ranks[0].all_reduce, 0, Exchange(1), ONE)
            assert refusals_until(1, ranks[0], logs)[0]["why"] == "it is a duplicate"
            assert ranks[2].mesh.send(0, from_rank_1(rank=2, sequence=1, ticket=1))
            assert total.result(PATIENCE_SECONDS).tolist() == [3.0]


def test_an_oversize_frame_ends_its_connection_and_no_other(strangers: Callable[..., Stranger]) -> None:
    addresses = ports(2)
    with closing(mesh_of(addresses, max_bytes=10_000)) as ranks:
        sums(ranks)
        big = strangers(addresses[0])
        big.socket.send(bytes(20_000))
        assert [total.tolist() for total in sums(ranks, Exchange(1))] == [[2.0]] * 2
        for found in sums(ranks, Exchange(2), np.zeros(20_000, np.uint8)):
            assert "20096 bytes at once; at most 10000 are accepted" in str(found)


@pytest.mark.parametrize("keyed", [False, True])
def test_fuzzed_frames_change_nothing(tmp_path: Path, keyed: bool) -> None:
    """From a rank's own connection, between two of its frames."""
    keys = keys_of(2) if keyed else None
    with closing(mesh_of(sockets_in(tmp_path, 2), keys=keys, timeout_seconds=PATIENCE_SECONDS)) as ranks:
        assert [total.tolist() for total in sums(ranks)] == [[2.0]] * 2
        with capture_logs():
            for data in fuzzed_frames(300, seed=1):
                while not ranks[1].mesh.send(0, data):
                    message = ranks[0].mesh.receive()
                    if message is not None:
                        ranks[0].mesh.read(message)
            assert [total.tolist() for total in sums(ranks, Exchange(1))] == [[2.0]] * 2
        assert ranks[0].mesh.watch.refused > LOGGED


# -- frames and messages that are sent again -------------------------------------------------------

JOIN = JoinRequest(protocol=PROTOCOL, version="1.0", rank=0, model="abc", process=7)
WELCOME = Welcome(
    run=NodeRun(policy="ep_balanced"), lost_after=PATIENCE_SECONDS, transport="zeromq", serial=1
)

# -- between nodes ---------------------------------------------------------------------------------------------


@contextmanager
def repeating(front: str, back: str, recorded: list[bytes]) -> Iterator[None]:
    """Pass frames on from one address to another, and back; before each, send all recorded ones again."""
    context: zmq.Context[Any] = zmq.Context()
    taking, giving = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
    taking.bind(front)
    giving.connect(back)
    ended = threading.Event()

    def pass_on() -> None:
        while not ended.is_set():
            if giving.poll(0):
                taking.send(giving.recv())
            if taking.poll(2):
                for frame in recorded:
                    giving.send(frame)
                recorded.append(taking.recv())
                giving.send(recorded[-1])

    thread = threading.Thread(target=pass_on)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        context.destroy(linger=0)


@contextmanager
def ranks_with_replays(folder: Path, epoch: int, recorded: list[bytes]) -> Iterator[list[ZeroMqTransport]]:
    """Two ranks, of which the first receives all frames of the second again and again."""
    first, second, behind = sockets_in(folder, 3)
    opened = [
        ZeroMqTransport([first, second], 0, epoch=epoch, listen=behind),
        ZeroMqTransport([first, second], 1, epoch=epoch),
    ]
    with closing(opened) as ranks, repeating(first, behind, recorded):
        yield ranks


def test_frames_of_earlier_exchanges_and_epochs_change_no_sum(tmp_path: Path) -> None:
    recorded: list[bytes] = []
    for epoch in (0, 1):
        with ranks_with_replays(tmp_path, epoch, recorded) as ranks:
            for ticket in range(4):
                part = np.full(3, ticket + 10 * epoch, np.float32)
                for total in sums(ranks, Exchange(ticket), part):
                    assert total.tolist() == (2 * part).tolist()
    assert len(recorded) >= 8


# -- between nodes and launcher --------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), max_size=12))
def test_each_message_is_taken_once_whatever_is_sent_again(again: list[int]) -> None:
    said, heard = Serials(), Serials()
    sent: list[Message] = []
    taken = []
    for number, index in enumerate(again):
        sent.append(said.number(Ping(number=number)))
        taken += [each for each in (sent[-1], *sent[:index], sent[-1]) if heard.is_new(each)]
    assert taken == sent


def test_a_node_s_tokens_that_are_sent_again_are_dropped() -> None:
    control = Control("127.0.0.1", 0, LAUNCHER, {NODES[0].public: "mac-0"})
    context: zmq.Context[Any] = zmq.Context()
    node = context.socket(zmq.DEALER)
    node.curve_serverkey = LAUNCHER.public.encode()
    node.curve_publickey, node.curve_secretkey = NODES[0].public.encode(), NODES[0].secret.encode()
    node.connect(f"tcp://127.0.0.1:{control.port}")
    first, second = (
        Tokens(epoch=0, order=0, place=token, tokens={0: [token]}, serial=token) for token in (1, 2)
    )
    last = Loading(epoch=0, done=1, total=1, serial=3)
    try:
        for message in (JOIN, first, first, second, first, second, last):
            node.send(pack(message))
        heard: list[Any] = []
        with capture_logs() as logs:
            while last not in heard:
                heard += [each.message for each in control.hear(0.05)]
        assert heard == [JOIN, first, second, last]
        assert [log["event"] for log in logs] == ["dropped a message that was sent before"] * 3
    finally:
        context.destroy(linger=0)
        control.close()


def test_a_launcher_s_orders_that_are_sent_again_are_dropped() -> None:
    context: zmq.Context[Any] = zmq.Context()
    launcher = context.socket(zmq.ROUTER)
    launcher.curve_server = True
    launcher.curve_publickey, launcher.curve_secretkey = LAUNCHER.public.encode(), LAUNCHER.secret.encode()
    port = launcher.bind_to_random_port("tcp://127.0.0.1")
    stopped: list[AllLoaded | Stop] = []
    link = ControlLink(cluster(port=port).launcher, NODES[0], on_epoch=stopped.append, on_gone=lambda: None)
    stop, end = Stop(epoch=0, reason="a node is lost", serial=2), Quit(serial=3)

    def answer() -> None:
        peer, _ = launcher.recv_multipart()
        for message in (WELCOME, stop, stop, WELCOME, end):
            launcher.send_multipart([peer, pack(message)])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        assert link.join(JOIN, PATIENCE_SECONDS).serial == 1
        assert [link.next(PATIENCE_SECONDS) for _ in range(2)] == [stop, end]
        assert stopped == [stop]
    finally:
        thread.join()
        link.close()
        context.destroy(linger=0)

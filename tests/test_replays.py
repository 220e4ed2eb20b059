"""Frames and messages of a run that are sent again: dropped, so that no sum and no token changes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from clusters import LAUNCHER, NODES, cluster
from meshes import closing, sockets_in, sums
from moesched.cluster.control import Control
from moesched.cluster.control_link import ControlLink
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
from patience import PATIENCE_SECONDS

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
    link = ControlLink(
        cluster(port=port).launcher,
        NODES[0],
        on_epoch=stopped.append,
        on_gone=lambda: None,
    )
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

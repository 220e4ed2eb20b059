"""Ranks over ZeroMQ: what is lost, late, different or strange is refused or named, and nobody is left to wait."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from structlog.testing import capture_logs

from fuzzed_frames import fuzzed_frames
from meshes import FIRST, ONE, at_once, closing, keys_of, mesh_of, ports, sockets_in, sums
from moesched.cluster.curve.zap import LOGGED
from moesched.errors import BadInput, RankLost, TransportError
from moesched.seams import Exchange
from moesched.transports.curve import Keys
from moesched.transports.frames import DTYPES, TEXT_BYTES, BadFrame, Frame, Kind, cut, pack, unpack
from moesched.transports.inbox import AHEAD_FRAMES
from moesched.transports.zeromq import ZeroMqTransport
from patience import PATIENCE_SECONDS, wait_until

# -- the wire format -------------------------------------------------------------------------------


@given(
    st.sampled_from([Kind.ALL_REDUCE, Kind.BROADCAST, Kind.GATHER]),
    arrays.arrays(
        st.sampled_from(DTYPES), arrays.array_shapes(min_dims=0, max_dims=8, min_side=0, max_side=3)
    ),
    st.text(max_size=40),
    st.integers(0, 2**64 - 1),
)
def test_a_frame_comes_out_as_it_went_in(kind: Kind, array: Any, text: str, epoch: int) -> None:
    sent = Frame(kind, kind, 3, epoch, 7, 9, -1, 2, 1, shape=array.shape, text=text, values=array.reshape(-1))
    data = pack(sent)
    found = unpack(data)
    assert msgspec.structs.replace(found, values=None) == msgspec.structs.replace(sent, values=None)
    assert (found.values.dtype, found.values.tobytes()) == (array.dtype, array.tobytes())


def test_large_frames_are_put_together_alike() -> None:
    values = np.arange(100_000, dtype=np.float32)
    found = unpack(pack(Frame(Kind.GATHER, Kind.GATHER, 0, shape=(100, 1000), text="large", values=values)))
    assert (found.shape, found.text, found.values.tolist()) == ((100, 1000), "large", values.tolist())


def test_a_frame_lies_at_the_places_that_the_docs_say() -> None:
    data = pack(Frame(Kind.ALL_REDUCE, Kind.ALL_REDUCE, 258, shape=(2,), text="t", values=np.ones(2, "<f4")))
    assert (data[:4], data[4], data[6:8], len(data)) == (b"MoEx", 1, b"\x02\x01", 96 + 16 + 8)


def test_long_texts_are_cut_and_stay_different() -> None:
    one, other = cut("x" * 9000 + "1"), cut("x" * 9000 + "2")
    assert one != other
    assert len(one.encode()) <= TEXT_BYTES


@pytest.mark.parametrize("array", [np.array([object()]), np.ones((1,) * 9), np.array(["text"])])
def test_what_is_no_array_of_numbers_cannot_be_sent(array: Any) -> None:
    with pytest.raises(TransportError, match="cannot be sent"):
        pack(Frame(Kind.GATHER, Kind.GATHER, 0, shape=array.shape, values=array.reshape(-1)))


@given(st.binary(max_size=300))
def test_bytes_that_are_no_frame_are_refused_as_such(data: bytes) -> None:
    with pytest.raises(BadFrame):
        unpack(data)


@pytest.mark.parametrize("keyed", [False, True])
def test_fuzzed_frames_change_nothing(tmp_path: Path, keyed: bool) -> None:
    """From a rank's own connection, between two of its frames."""
    keys = keys_of(2) if keyed else None
    with closing(mesh_of(sockets_in(tmp_path, 2), keys=keys, timeout_seconds=PATIENCE_SECONDS)) as ranks:
        assert [total.tolist() for total in sums(ranks)] == [[2.0]] * 2
        with capture_logs():
            for data in fuzzed_frames(300, seed=1):
                while not ranks[1].mesh.send(0, data):
                    ranks[0].mesh.read(ranks[0].mesh.receive())
            assert [total.tolist() for total in sums(ranks, Exchange(1))] == [[2.0]] * 2
        assert ranks[0].mesh.watch.refused > LOGGED


# -- sums ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_large_parts_are_summed_in_the_order_of_the_ranks_too(tmp_path: Path, ranks: int) -> None:
    random = np.random.default_rng(0)
    parts = random.standard_normal((ranks, 37, 2999)).astype(np.float32) * 10.0 ** random.integers(-6, 6)
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    with closing(mesh_of(sockets_in(tmp_path, ranks))) as transports:
        calls = [
            lambda each=each, part=part: each.all_reduce(each.rank, FIRST, part)
            for each, part in zip(transports, parts, strict=True)
        ]
        for total in at_once(*calls):
            assert total.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "part", [np.float64(3), np.ones((4, 6)).T, np.ones((0, 5), np.float32), np.arange(3, dtype=np.int64)]
)
def test_parts_of_any_layout_can_be_summed(tmp_path: Path, part: Any) -> None:
    part = np.asarray(part)
    with closing(mesh_of(sockets_in(tmp_path, 2))) as ranks:
        for total in sums(ranks, FIRST, part):
            assert (total.shape, total.dtype, total.tolist()) == (part.shape, part.dtype, (2 * part).tolist())


def test_results_are_the_caller_s_own(tmp_path: Path) -> None:
    with closing(mesh_of(sockets_in(tmp_path, 2))) as (first, second):
        part = np.ones(3)
        for found in at_once(
            lambda: first.broadcast(0, FIRST, part, 0), lambda: second.broadcast(1, FIRST, None, 0)
        ):
            found += 1
        assert part.tolist() == [1, 1, 1]


def test_a_rank_may_run_ahead_of_one_that_does_not_listen(tmp_path: Path) -> None:
    with closing(mesh_of(sockets_in(tmp_path, 3), timeout_seconds=PATIENCE_SECONDS)) as ranks:
        exchanges = [Exchange(ticket) for ticket in range(200)]
        sent = [np.full(500, ticket) for ticket in range(200)]

        def give() -> None:
            for exchange, array in zip(exchanges, sent, strict=True):
                ranks[0].broadcast(0, exchange, array, 0)

        def take(rank: int) -> list[int]:
            return [int(ranks[rank].broadcast(rank, each, None, 0)[0]) for each in exchanges]

        _, first, second = at_once(give, lambda: take(1), lambda: take(2))
        assert first == second == list(range(200))


def test_a_rank_that_is_too_far_ahead_is_named(tmp_path: Path) -> None:
    with closing(mesh_of(sockets_in(tmp_path, 3), timeout_seconds=PATIENCE_SECONDS)) as ranks:

        def run_ahead() -> None:
            for ticket in range(AHEAD_FRAMES + 10):
                ranks[1].gather(1, Exchange(ticket), ONE, 0)

        found = at_once(lambda: ranks[0].gather(0, FIRST, ONE, 0), run_ahead)
        assert f"rank 1 is {AHEAD_FRAMES + 1} frames ahead" in str(found[0])


# -- ranks that disagree ---------------------------------------------------------------------------


def test_parts_of_different_shapes_are_named(tmp_path: Path) -> None:
    with closing(mesh_of(sockets_in(tmp_path, 2))) as ranks:
        found = at_once(
            *(lambda one=one: one.all_reduce(one.rank, FIRST, np.ones(one.rank + 1)) for one in ranks)
        )
        for error in found:
            assert isinstance(error, TransportError)
            assert "float64 (1,)" in str(error)
            assert "float64 (2,)" in str(error)


def test_ranks_that_each_wait_for_the_other_find_out(tmp_path: Path) -> None:
    """Neither sends anything, since each is the one who is sent to."""
    with closing(mesh_of(sockets_in(tmp_path, 2))) as ranks:
        found = at_once(*(lambda one=one: one.gather(one.rank, FIRST, ONE, one.rank) for one in ranks))
        for error in found:
            assert isinstance(error, TransportError)
            assert "gather #0 with root 0" in str(error)
            assert "gather #0 with root 1" in str(error)


def test_a_rank_that_left_out_an_exchange_is_named(tmp_path: Path) -> None:
    with closing(mesh_of(sockets_in(tmp_path, 3))) as ranks:
        found = at_once(
            lambda: ranks[0].gather(0, Exchange(0, "what all see"), ONE, 0),
            lambda: ranks[1].gather(1, Exchange(0, "what all see"), ONE, 0),
            lambda: [ranks[2].gather(2, Exchange(ticket), ONE, 1 - ticket) for ticket in range(2)],
        )
        assert isinstance(found[0], TransportError)
        assert "rank 2" in str(found[0])


def test_calls_in_another_order_are_named_by_their_tickets(tmp_path: Path) -> None:
    with closing(mesh_of(sockets_in(tmp_path, 2))) as ranks:
        found = at_once(*(lambda one=one: one.all_reduce(one.rank, Exchange(one.rank), ONE) for one in ranks))
        assert all("all-reduce #0" in str(error) and "all-reduce #1" in str(error) for error in found)


def test_an_exchange_that_a_rank_gave_up_can_be_followed_by_others(tmp_path: Path) -> None:
    with closing(mesh_of(sockets_in(tmp_path, 2))) as (first, second):
        second.abandon(1, FIRST, "out of memory")
        with pytest.raises(TransportError, match="all-reduce #0: rank 1 gave up: out of memory"):
            first.all_reduce(0, FIRST, ONE)
        assert [total.tolist() for total in sums([first, second], Exchange(1))] == [[2.0]] * 2


def test_a_call_for_another_rank_is_refused(tmp_path: Path) -> None:
    with closing(mesh_of(sockets_in(tmp_path, 2))) as (first, _):
        with pytest.raises(TransportError, match="asked for rank 1 and root 0 of rank 0 of 2"):
            first.all_reduce(1, FIRST, ONE)


# -- ranks that are late or lost -------------------------------------------------------------------


def test_ranks_that_do_not_come_in_time_are_named(tmp_path: Path) -> None:
    addresses = sockets_in(tmp_path, 3)
    with closing([ZeroMqTransport(addresses, 1, timeout_seconds=0.1)]) as (alone,):
        with pytest.raises(TransportError, match=r"all-reduce #0: rank 0 did not come in 0\.1 s"):
            alone.all_reduce(1, FIRST, ONE)


def test_ranks_may_start_in_any_order(tmp_path: Path) -> None:
    addresses = sockets_in(tmp_path, 2)
    with closing([ZeroMqTransport(addresses, 1)]) as (second,), ThreadPoolExecutor(1) as threads:
        total = threads.submit(second.all_reduce, 1, FIRST, ONE)
        with closing([ZeroMqTransport(addresses, 0)]) as (first,):
            assert (
                first.all_reduce(0, FIRST, ONE).tolist() == total.result(PATIENCE_SECONDS).tolist() == [2.0]
            )


def test_a_rank_that_closes_its_transport_is_missed_at_once(tmp_path: Path) -> None:
    with closing(mesh_of(sockets_in(tmp_path, 3))) as ranks:
        sums(ranks)
        asyncio.run(ranks[2].aclose())
        for found in sums(ranks[:2], Exchange(1)):
            assert isinstance(found, RankLost)
            assert found.ranks == (2,)
            assert re.fullmatch(
                r"all-reduce #1: (rank [01] gave up: )?rank 2 is lost: it closed its transport", str(found)
            )


def test_what_a_rank_said_last_is_heard_after_its_own_socket_is_gone(tmp_path: Path) -> None:
    """A rank listens on one connection and speaks on another: the second may end much later than the first."""
    addresses = sockets_in(tmp_path, 2)
    with closing([ZeroMqTransport(addresses, 0)]) as (first,), zmq.Context() as context:
        ear, mouth = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        ear.bind(addresses[1])
        mouth.connect(addresses[0])
        mouth.send(from_rank_1())
        first.all_reduce(0, FIRST, ONE)
        ear.close(0)
        wait_until(lambda: first.mesh.watch.hung_up(1), "the end of a connection")
        assert not first.mesh.watch.lost(1)
        mouth.send(pack(Frame(Kind.LEAVE, Kind.ABANDON, 1, text="out of memory")))
        mouth.close()
        with pytest.raises(RankLost, match="rank 1 is lost: out of memory"):
            first.all_reduce(0, Exchange(1), ONE)


def test_a_rank_is_lost_when_both_of_its_connections_ended(tmp_path: Path) -> None:
    addresses = sockets_in(tmp_path, 2)
    with closing([ZeroMqTransport(addresses, 0)]) as (first,), zmq.Context() as context:
        ear, mouth = context.socket(zmq.DEALER), context.socket(zmq.DEALER)
        ear.bind(addresses[1])
        mouth.connect(addresses[0])
        mouth.send(from_rank_1())
        first.all_reduce(0, FIRST, ONE)
        ear.close(0)
        mouth.close()
        with pytest.raises(RankLost, match="rank 1 is lost: its connection ended"):
            first.all_reduce(0, Exchange(1), ONE)


RANK = """
import os, sys
import numpy as np
from moesched.seams import Exchange
from moesched.transports.zeromq import ZeroMqTransport

rank, secret, *rest = sys.argv[1:]
addresses, public = rest[: len(rest) // 2], rest[len(rest) // 2 :]
transport = ZeroMqTransport(addresses, int(rank), keys=(secret, public))
transport.all_reduce(int(rank), Exchange(0), np.ones(1, np.float32))
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_process_is_missed_long_before_the_time_out() -> None:
    addresses, keys = ports(2), keys_of(2)
    other = subprocess.Popen(
        [sys.executable, "-c", RANK, "1", keys[1].secret, *addresses, *keys[1].public],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with closing([ZeroMqTransport(addresses, 0, keys=keys[0], timeout_seconds=3600.0)]) as (transport,):
        transport.all_reduce(0, FIRST, ONE)
        assert other.stdout is not None and other.stdout.readline() == b"here\n"
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(transport.all_reduce, 0, Exchange(1), ONE)
            os.kill(other.pid, signal.SIGKILL)
            error = waiting.exception(PATIENCE_SECONDS)
        other.communicate()
    assert isinstance(error, RankLost)
    assert (error.ranks, str(error)) == ((1,), "all-reduce #1: rank 1 is lost: its connection ended")


@pytest.mark.slow
def test_a_process_that_hangs_is_missed_by_its_heartbeat() -> None:
    addresses, keys = ports(2), keys_of(2)
    other = subprocess.Popen(
        [sys.executable, "-c", RANK, "1", keys[1].secret, *addresses, *keys[1].public],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        with closing([ZeroMqTransport(addresses, 0, keys=keys[0], lost_after_seconds=1.0)]) as (transport,):
            transport.all_reduce(0, FIRST, ONE)
            os.kill(other.pid, signal.SIGSTOP)
            with pytest.raises(RankLost, match="rank 1 is lost: its connection ended"):
                transport.all_reduce(0, Exchange(1), ONE)
    finally:
        other.kill()
        other.communicate()


def test_an_exchange_that_ended_before_a_rank_left_counts(tmp_path: Path) -> None:
    """What was sent is read, though the connection is gone by then."""
    part = np.ones((400, 1000), np.float32)
    with closing(mesh_of(sockets_in(tmp_path, 2))) as (first, second):
        second.gather(1, FIRST, part, 0)
        asyncio.run(second.aclose())
        found = first.gather(0, FIRST, part, 0)
        assert [each.shape for each in found] == [(400, 1000)] * 2


def test_ranks_start_anew_at_the_same_addresses_with_another_epoch() -> None:
    addresses, keys = ports(2), keys_of(2)
    for epoch in range(3):
        with closing(mesh_of(addresses, keys=keys, epoch=epoch)) as ranks:
            assert [total.tolist() for total in sums(ranks)] == [[2.0]] * 2


# -- strangers -------------------------------------------------------------------------------------


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


def from_rank_1(**changes: Any) -> Any:
    """The bytes of a frame that rank 1 might send in the first exchange."""
    frame = Frame(Kind.ALL_REDUCE, Kind.ALL_REDUCE, 1, shape=(1,), values=ONE)
    return pack(msgspec.structs.replace(frame, **changes))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (from_rank_1(epoch=4), "of epoch 4; this is epoch 5"),
        (from_rank_1(epoch=5, rank=0), "from rank 0, which is not one of the others"),
        (from_rank_1(epoch=5, rank=700), "from rank 700, which is not one of the others"),
        (b"GET / HTTP/1.1\r\n", "16 bytes, less than a header"),
        (b"\x80\x04\x95" + bytes(200), r"it begins with b'\x80\x04\x95\x00'"),
        (bytes(from_rank_1(epoch=5))[:-1], "99 bytes for 0 of text and 1 of float32"),
        (b"MoEx\x02" + bytes(from_rank_1(epoch=5))[5:], "version 2 of the wire format; this is version 1"),
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


def test_a_rank_cannot_speak_for_another_one(tmp_path: Path) -> None:
    with closing(mesh_of(sockets_in(tmp_path, 3), keys=keys_of(3))) as ranks, capture_logs() as logs:
        sums(ranks)
        forged = from_rank_1(sequence=1, ticket=1, values=np.full(1, 9, np.float32))
        assert ranks[2].mesh.send(0, forged)
        assert [total.tolist() for total in sums(ranks, Exchange(1))] == [[3.0]] * 3
        assert refusals_until(1, ranks[0], logs)[0]["why"] == "from rank 1, with the key of rank 2"


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


# -- what cannot be made ---------------------------------------------------------------------------


def test_a_port_in_use_is_named() -> None:
    addresses = ports(2)
    with closing([ZeroMqTransport(addresses, 0)]), pytest.raises(BadInput) as refused:
        ZeroMqTransport(addresses, 0)
    assert str(refused.value) == f"rank 0 cannot listen at {addresses[0]}: Address already in use"


@pytest.mark.parametrize(
    ("addresses", "said"),
    [
        (["tcp://10.0.0.1:5000", "tcp://127.0.0.1:5000"], "rank 0 at tcp://10.0.0.1:5000 may be on another machine"),
        (["tcp://127.evil.com:5000", "ipc://exchange"], "may be on another machine"),
        (["127.0.0.1:5000", "ipc://exchange"], "the address of rank 0 is '127.0.0.1:5000'; write tcp://HOST:PORT"),
        (["ipc://exchange", "ipc://exchange"], "ranks 0 and 1 have the same address"),
        ([], "rank 0 of 0 addresses"),
    ],
)  # fmt: skip
def test_addresses_that_cannot_be_used_are_refused(addresses: list[str], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        ZeroMqTransport(addresses, 0)


def test_keys_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    addresses, (first, second) = sockets_in(tmp_path, 2), keys_of(2)
    for keys, said in (
        (second, "the secret key does not belong to the public key of rank 0"),
        (Keys(first.secret, first.public[:1]), "1 public keys for 2 ranks"),
        (Keys(first.secret, [first.public[0]] * 2), "two ranks have the same public key"),
        (
            Keys(first.secret, [first.public[0], "short"]),
            "the public key of rank 1 is not valid: it has 5 characters, a key has 40",
        ),
        (
            Keys("no key", first.public),
            "the secret key is not valid: it has 6 characters, a key has 40: make one with `moesched keygen`",
        ),
    ):
        with pytest.raises(BadInput, match=said):
            ZeroMqTransport(addresses, 0, keys=keys)


def test_secrets_are_not_shown() -> None:
    (keys,) = keys_of(1)
    assert keys.secret not in repr(keys)

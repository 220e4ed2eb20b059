"""Ranks over ZeroMQ: sums, and errors that name the rank that differs, is late or is lost."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import zmq
from zmq.utils.garbage import gc as frames

from meshes import (
    FIRST,
    GREETING,
    ONE,
    at_once,
    closing,
    from_rank_1,
    keys_of,
    mesh_of,
    ports,
    sockets_in,
    sums,
)
from moesched.errors import BadInput, RankLost, TransportError
from moesched.seams import Exchange
from moesched.transports.curve import Keys
from moesched.transports.frames import Frame, Kind, pack
from moesched.transports.inbox import AHEAD_FRAMES
from moesched.transports.mesh import LINGER_MILLISECONDS
from moesched.transports.zeromq import ZeroMqTransport
from patience import PATIENCE_SECONDS, wait_until

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


def test_ranks_of_one_process_do_not_race_to_start_the_collector_of_sent_frames(tmp_path: Path) -> None:
    frames.stop()
    with closing(mesh_of(sockets_in(tmp_path, 2))):
        assert frames.is_alive()


@pytest.mark.parametrize(
    "part", [np.float64(3), np.ones((4, 6)).T, np.ones((0, 5), np.float32), np.arange(3, dtype=np.int64)]
)
def test_parts_of_any_layout_can_be_summed(tmp_path: Path, part: Any) -> None:
    part = np.asarray(part)
    with closing(mesh_of(sockets_in(tmp_path, 2))) as ranks:
        for total in sums(ranks, FIRST, part):
            assert (total.shape, total.dtype, total.tolist()) == (part.shape, part.dtype, (2 * part).tolist())


def test_a_part_that_came_before_its_exchange_is_in_its_sum(tmp_path: Path) -> None:
    """Of three ranks, the slowest one gets the next part of the fastest one first."""
    with closing(mesh_of(sockets_in(tmp_path, 3), timeout_seconds=PATIENCE_SECONDS)) as ranks:

        def add_up(rank: int) -> list[float]:
            return [
                float(ranks[rank].all_reduce(rank, Exchange(ticket), ONE * ticket)[0])
                for ticket in range(100)
            ]

        for found in at_once(*(lambda rank=rank: add_up(rank) for rank in range(3))):
            assert found == [3.0 * ticket for ticket in range(100)]


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


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda one: one.all_reduce(one.rank, FIRST, np.ones(one.rank + 1)),
            ["float64 (1,)", "float64 (2,)"],
        ),
        (
            lambda one: one.gather(one.rank, FIRST, ONE, one.rank),
            ["gather #0 with root 0", "gather #0 with root 1"],
        ),
        (
            lambda one: one.all_reduce(one.rank, Exchange(one.rank), ONE),
            ["all-reduce #0", "all-reduce #1"],
        ),
    ],
    ids=["parts of different shapes", "each waits for the other", "another order"],
)
def test_ranks_that_disagree_are_told_what_each_said(tmp_path: Path, call: Any, said: list[str]) -> None:
    with closing(mesh_of(sockets_in(tmp_path, 2))) as ranks:
        for error in at_once(*(partial(call, one) for one in ranks)):
            assert isinstance(error, TransportError)
            assert all(each in str(error) for each in said)


def test_a_rank_that_left_out_an_exchange_is_named(tmp_path: Path) -> None:
    with closing(mesh_of(sockets_in(tmp_path, 3))) as ranks:
        found = at_once(
            lambda: ranks[0].gather(0, Exchange(0, "what all see"), ONE, 0),
            lambda: ranks[1].gather(1, Exchange(0, "what all see"), ONE, 0),
            lambda: [ranks[2].gather(2, Exchange(ticket), ONE, 1 - ticket) for ticket in range(2)],
        )
        assert isinstance(found[0], TransportError)
        assert "rank 2" in str(found[0])


def test_an_exchange_that_a_rank_gave_up_can_be_followed_by_others(tmp_path: Path) -> None:
    with closing(mesh_of(sockets_in(tmp_path, 2))) as (first, second):
        second.abandon(1, FIRST, "out of memory in \udcff")
        with pytest.raises(TransportError, match=r"all-reduce #0: rank 1 gave up: out of memory in \\udcff"):
            first.all_reduce(0, FIRST, ONE)
        assert [total.tolist() for total in sums([first, second], Exchange(1))] == [[2.0]] * 2


def test_the_others_hear_why_a_part_cannot_be_sent(tmp_path: Path) -> None:
    with closing(mesh_of(sockets_in(tmp_path, 2), timeout_seconds=PATIENCE_SECONDS)) as (first, second):
        dates = np.zeros(1, "datetime64[s]")
        found = at_once(lambda: first.all_reduce(0, FIRST, dates), lambda: second.all_reduce(1, FIRST, ONE))
        problem = "an array of datetime64[s] (1,) cannot be sent"
        assert str(found[0]) == f"all-reduce #0: {problem}"
        assert str(found[1]) == f"all-reduce #0: rank 0 gave up: {problem}"


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


def test_ranks_whose_keys_differ_learn_why_the_other_does_not_come() -> None:
    addresses, keys, others = ports(2), keys_of(2), keys_of(2)
    mine = Keys(others[1].secret, [keys[0].public[0], others[1].public[1]])
    ranks = [
        ZeroMqTransport(addresses, 0, keys=keys[0], timeout_seconds=0.5),
        ZeroMqTransport(addresses, 1, keys=mine, timeout_seconds=0.5),
    ]
    with closing(ranks):
        wait_until(lambda: ranks[0].mesh.trouble(1) and ranks[1].mesh.trouble(0), "why each is refused")
        first, second = sums(ranks)
    assert re.search(
        r"rank 1 did not come in 0\.5 s; rank 1: a connection from .* was refused: its key is not known here",
        str(first),
    )
    assert str(second).endswith("rank 0 did not come in 0.5 s; rank 0: it does not know our key")


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


def test_ranks_that_close_at_once_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async def close(ranks: list[ZeroMqTransport]) -> None:
        with anyio.fail_after(LINGER_MILLISECONDS / 2000):
            await asyncio.gather(*(rank.aclose() for rank in ranks))

    for _ in range(100):
        ranks = mesh_of(sockets_in(tmp_path, 2))
        sums(ranks)
        asyncio.run(close(ranks))


@contextmanager
def rank_and_its_bare_peer(folder: Path) -> Iterator[tuple[ZeroMqTransport, zmq.Socket[bytes]]]:
    """Rank 0 after one exchange with rank 1, and the socket of rank 1."""
    addresses = sockets_in(folder, 2)
    with closing([ZeroMqTransport(addresses, 0)]) as (first,), zmq.Context() as context:
        second = context.socket(zmq.DEALER)
        second.connect(addresses[0])
        for data in (GREETING, from_rank_1()):
            second.send(data)
        first.all_reduce(0, FIRST, ONE)
        yield first, second


def test_what_a_rank_said_last_is_heard_after_its_connection_ended(tmp_path: Path) -> None:
    with rank_and_its_bare_peer(tmp_path) as (first, second):
        second.send(pack(Frame(Kind.LEAVE, Kind.ABANDON, 1, text="out of memory")))
        second.close()
        wait_until(lambda: first.mesh.lost(1), "the end of a connection")
        with pytest.raises(RankLost, match="rank 1 is lost: out of memory"):
            first.all_reduce(0, Exchange(1), ONE)


def test_a_rank_is_lost_when_its_connection_ended(tmp_path: Path) -> None:
    with rank_and_its_bare_peer(tmp_path) as (first, second):
        second.close()
        with pytest.raises(RankLost, match="rank 1 is lost: its connection ended"):
            first.all_reduce(0, Exchange(1), ONE)


def test_a_rank_that_ended_before_it_was_heard_is_lost(tmp_path: Path) -> None:
    addresses = sockets_in(tmp_path, 2)
    with closing([ZeroMqTransport(addresses, 0)]) as (first,), zmq.Context() as context:
        second = context.socket(zmq.DEALER)
        second.connect(addresses[0])
        second.send(GREETING)
        second.close()
        with pytest.raises(RankLost, match="rank 1 is lost: its connection ended"):
            first.all_reduce(0, FIRST, ONE)


def test_a_rank_is_lost_when_the_one_that_it_connected_to_ended(tmp_path: Path) -> None:
    addresses = sockets_in(tmp_path, 2)
    with zmq.Context() as context, closing([ZeroMqTransport(addresses, 1)]) as (second,):
        first = context.socket(zmq.ROUTER)
        first.bind(addresses[0])
        name, greeting = first.recv_multipart()
        assert greeting == GREETING
        first.send_multipart([name, from_rank_1(rank=0)])
        assert second.all_reduce(1, FIRST, ONE).tolist() == [2.0]
        first.close(0)
        with pytest.raises(RankLost, match="rank 0 is lost: its connection ended"):
            second.all_reduce(1, Exchange(1), ONE)


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


def with_a_process() -> tuple[list[str], list[Keys], subprocess.Popen[bytes]]:
    """Addresses and keys of two ranks, and a process that is the second of them."""
    addresses, keys = ports(2), keys_of(2)
    command = [sys.executable, "-c", RANK, "1", keys[1].secret, *addresses, *keys[1].public]
    return addresses, keys, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.slow
def test_a_killed_process_is_missed_long_before_the_time_out() -> None:
    addresses, keys, other = with_a_process()
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
    addresses, keys, other = with_a_process()
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
    """A sent message is read although its connection has closed since."""
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


# -- what cannot be made ---------------------------------------------------------------------------


def test_a_port_in_use_is_named() -> None:
    addresses = ports(2)
    with closing([ZeroMqTransport(addresses, 0)]), pytest.raises(BadInput) as refused:
        ZeroMqTransport(addresses, 0)
    assert str(refused.value) == f"rank 0 cannot listen at {addresses[0]}: Address already in use"


def test_an_address_that_nobody_can_connect_to_is_named() -> None:
    long = f"ipc://{'x' * 200}"
    with pytest.raises(BadInput) as refused:
        ZeroMqTransport([long, *ports(1)], 1)
    assert str(refused.value) == f"rank 1 cannot connect to {long}: File name too long"


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

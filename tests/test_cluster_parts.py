"""Parts of a launcher: tokens left to generate, clocks, slow nodes, admission, messages."""

from __future__ import annotations

import itertools
import random
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusters import LAUNCHER, NODES, cluster
from moesched.cluster.clocks import ClockMeter, ClockOffset
from moesched.cluster.cluster_file import LauncherAddress
from moesched.cluster.control import Control
from moesched.cluster.control_link import ControlLink
from moesched.cluster.curve.keys import KeyPair, make_keys
from moesched.cluster.endpoints import reserved_port
from moesched.cluster.handshake import Expected, fingerprint, refusal
from moesched.cluster.messages import (
    MOST_BYTES,
    PROTOCOL,
    Failed,
    JoinRequest,
    Ping,
    Pong,
    Refused,
    Stop,
    Unreadable,
    pack,
    read_launcher,
    read_node,
)
from moesched.cluster.node_reports import NodeReports
from moesched.cluster.slowness import STEPS_IN_A_ROW, SlowNodes
from moesched.cluster.token_log import TokenLog
from moesched.errors import BadInput
from moesched.models.checkpoint import open_checkpoint
from moesched.trace import LaneName, MemorySample, Recording, Slice, TaskInfo, merge_recordings
from patience import PATIENCE_SECONDS
from small_models import small_model

LOOPBACKS = ["127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])]


@contextmanager
def control_and_link(
    address: str = "127.0.0.1", launcher: KeyPair = LAUNCHER, node: KeyPair = NODES[0]
) -> Iterator[tuple[Control, ControlLink]]:
    """A launcher's end and a node's end of a control channel."""
    control = Control(address, 0, launcher, {NODES[0].public: "mac-0"})
    where = LauncherAddress(address=address, port=control.port, key=LAUNCHER.public)
    link = ControlLink(where, node, on_epoch=lambda _: None, on_gone=lambda: None)
    try:
        yield control, link
    finally:
        link.close()
        control.close()


# ---------------------------------------------------------------- tokens

STOP = 99


def log_of(*prompts: list[int], new_tokens: int = 3) -> TokenLog:
    return TokenLog(prompts, new_tokens, [STOP])


@pytest.mark.parametrize(
    ("prompts", "steps", "left"),
    [
        ([[1, 2], [3]], [], (0, [[1, 2], [3]], 3)),
        ([[1, 2], [3]], [{0: [token], 1: [token]} for token in (7, 8, 9)], None),
        ([[1], [2], [3]], [{0: [7], 1: [8]}], (0, [[1, 7], [2, 8]], 2)),
        ([[1], [2], [3]], [{0: [7], 1: [8]}, {0: [7, 7], 1: [8, 8]}], (2, [[3]], 3)),
    ],
    ids=[
        "all at first",
        "nothing at the end",
        "what has begun goes on before anything else",
        "then the others",
    ],
)
def test_what_is_left_is(prompts: list[list[int]], steps: list[dict[int, list[int]]], left: object) -> None:
    log = log_of(*prompts)
    for tokens in steps:
        log.add(tokens)
    assert log.remainder() == left
    assert log.count == sum(len(tokens) for step in steps for tokens in step.values())


def test_a_finished_request_between_others_keeps_its_place_and_its_tokens() -> None:
    log = log_of([1], [2], [3])
    log.add({0: [7], 1: [STOP], 2: [9]})
    assert log.remainder() == (0, [[1, 7], [2], [3, 9]], 2)
    assert log.add({0: [7], 1: [5], 2: [9]}) == {0: [7], 2: [9]}
    assert log.tokens == [[7, 7], [STOP], [9, 9]]
    log = log_of([1], [2])
    log.add({0: [7]}, ended=[0])
    assert log.remainder() == (1, [[2]], 3), "one that ended without a stop token"


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=12))
def test_whatever_of_a_step_arrives_every_request_ends_with_all_its_tokens(cuts: list[list[int]]) -> None:
    log = log_of([1], [2], [3], new_tokens=4)
    for arrived in cuts:
        left = log.remainder()
        if left is None:
            break
        log.add({left.first_request + place: [5] for place in arrived if place < len(left.prompts)})
    while (left := log.remainder()) is not None:
        for _ in range(left.new_tokens):
            log.add({left.first_request + place: [5] for place in range(len(left.prompts))})
    assert log.tokens == [[5] * 4] * 3


# ---------------------------------------------------------------- clocks


def test_the_shortest_trip_tells_a_clocks_offset_best() -> None:
    meter = ClockMeter()
    for number, (sent, clock, back) in enumerate([(0, 1500, 400), (1000, 2030, 1020), (2000, 3300, 2900)]):
        meter.ask(number, sent)
        meter.answer(number, clock, back)
    assert meter.best == ClockOffset(offset=1020, error=10)
    meter = ClockMeter()
    meter.answer(5, 0, 0)
    meter.ask(1, 0)
    meter.answer(1, 10, 2)
    meter.answer(1, 99, 2)
    assert meter.best == ClockOffset(offset=9, error=1), "answers that nobody asked for are ignored"


def test_clocks_that_drift_for_ten_minutes_leave_every_exchange_in_its_order() -> None:
    meter, draw, second = ClockMeter(), random.Random(1), 10**9

    def clock_of_node(time: int) -> int:
        return 7 * second + time + time * 50 // 10**6

    for number in range(6000):
        sent = number * second // 10
        there, back = (draw.randrange(50_000, 400_000) for _ in "tb")
        meter.ask(number, sent)
        meter.answer(number, clock_of_node(sent + there), sent + there + back)
    times = range(second, 599 * second, second)
    work = 2_000_000
    launchers = recording(0, *[(time, time + work) for time in times])
    origin = clock_of_node(0)
    of_node = [clock_of_node(time + work) - origin for time in times]
    merged = merge_recordings(
        {0: launchers, 1: recording(origin, *[(start, start + work) for start in of_node])},
        {1: meter.ahead_at},
    )
    ranks = [each.lane.rank for each in merged.slices]
    assert ranks == [0, 1] * len(times)
    starts = {each.lane.rank: each.start for each in merged.slices}
    assert abs(starts[1] - starts[0] - work) < 400_000
    for one, after in itertools.pairwise(each for each in merged.slices if each.lane.rank == 1):
        assert one.end <= after.start


# ---------------------------------------------------------------- slow nodes


def test_a_node_that_computes_twice_as_long_as_the_others_is_told_once() -> None:
    slow = SlowNodes([0, 1, 2])
    told = []
    for _ in range(2 * STEPS_IN_A_ROW):
        for rank, seconds in ((0, 0.1), (1, 0.35), (2, 0.1)):
            told.append(slow.computed(rank, seconds))
    assert [each for each in told if each] == [{1: pytest.approx(3.5)}]


def test_one_long_step_makes_no_slow_node() -> None:
    slow = SlowNodes([0, 1])
    for step in range(20):
        assert not slow.computed(0, 0.1)
        assert not slow.computed(1, 0.9 if step % STEPS_IN_A_ROW == 0 else 0.1)


# ---------------------------------------------------------------- who may join

EXPECTED = Expected(version="1.0", model="abc")
JOIN = JoinRequest(protocol=PROTOCOL, version="1.0", rank=1, model="abc", process=7)


def said_to(join: JoinRequest, key: str = NODES[1].public) -> str | None:
    return refusal(join, key, cluster(), EXPECTED)


def test_a_node_that_has_what_the_launcher_has_may_join() -> None:
    assert said_to(JOIN) is None


def test_another_version_model_rank_or_key_is_refused_in_one_line() -> None:
    change = msgspec.structs.replace
    for join, key, said in (
        (change(JOIN, version="0.9"), NODES[1].public, "moesched 0.9"),
        (change(JOIN, protocol=99), NODES[1].public, "protocol 99"),
        (change(JOIN, model="abd"), NODES[1].public, "its model differs from the launcher"),
        (change(JOIN, rank=7), NODES[1].public, "it has rank 7"),
        (JOIN, NODES[0].public, "its key is that of rank 0"),
        (JOIN, LAUNCHER.public, "its key is the launcher's"),
    ):
        reason = said_to(join, key)
        assert reason is not None and said in reason and "\n" not in reason


def test_copies_of_a_model_have_one_fingerprint_and_others_another(tmp_path: Path) -> None:
    prints = [
        fingerprint(open_checkpoint(small_model(tmp_path / name, layers=layers, top_k=top_k)))
        for name, layers, top_k in (("a", 2, 2), ("b", 2, 2), ("c", 3, 2), ("d", 2, 1))
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


# ---------------------------------------------------------------- messages


def test_what_is_packed_is_read_and_what_the_other_side_says_is_not() -> None:
    for said in (JOIN, Pong(number=1, clock=2**60)):
        assert read_node(pack(said)) == said
    assert read_launcher(pack(Ping(number=3))) == Ping(number=3)
    with pytest.raises(Unreadable):
        read_node(pack(Ping(number=3)))


WIRE = {"type": "Join", "version": "1.0", "rank": 1, "model": "abc", "process": 7, "epoch": -1}
"""The fields that the join of every protocol has."""


@pytest.mark.parametrize(
    ("join", "said"),
    [
        ({"protocol": 1}, "moesched 1.0, protocol 1"),
        ({"protocol": PROTOCOL, "version": "9.0", "colour": "blue"}, f"moesched 9.0, protocol {PROTOCOL}"),
    ],
)
def test_a_node_of_another_protocol_or_version_is_refused_in_one_line_that_names_both(
    join: dict[str, Any], said: str
) -> None:
    read = read_node(msgspec.msgpack.encode(WIRE | join))
    assert isinstance(read, JoinRequest)
    remedy = "install the same version everywhere"
    assert said_to(read) == f"it has {said}, and the launcher 1.0, protocol {PROTOCOL}: {remedy}"


def test_the_join_of_this_protocol_and_its_refusal_are_understood_in_every_other_one() -> None:
    assert msgspec.msgpack.decode(pack(JOIN)) == WIRE | {"protocol": PROTOCOL, "build": {}}
    assert msgspec.msgpack.decode(pack(Refused(reason="old"))) == {"type": "Refused", "reason": "old"}


@pytest.mark.parametrize("address", LOOPBACKS)
def test_a_stranger_is_refused_and_told_so_and_the_launcher_stays(address: str) -> None:
    with control_and_link(address, node=make_keys()) as (control, link):
        with pytest.raises(BadInput, match="does not know this node's key"):
            _join_while_heard(link, control)
        assert control.refused == [address]


def test_a_launcher_with_another_key_is_found_out() -> None:
    with (
        control_and_link(launcher=make_keys()) as (impostor, link),
        pytest.raises(BadInput, match="does not have the launcher's key from the cluster file"),
    ):
        _join_while_heard(link, impostor)


def test_a_launcher_that_breaks_off_a_handshake_is_asked_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as thread:
        where = LauncherAddress(address="127.0.0.1", port=listener.getsockname()[1], key=LAUNCHER.public)
        link = ControlLink(where, NODES[0], on_epoch=lambda _: None, on_gone=lambda: None)
        joining = thread.submit(link.join, JOIN, PATIENCE_SECONDS)
        connection, _ = listener.accept()
        listener.close()
        connection.close()
        with (
            closing(link),
            closing(Control("127.0.0.1", where.port, LAUNCHER, {NODES[0].public: "mac-0"})) as control,
        ):
            assert "it was heard" in str(refused_by(control, joining))


def test_garbage_on_the_launchers_port_harms_nobody() -> None:
    draw = random.Random(0)
    with control_and_link() as (control, link), ThreadPoolExecutor(1) as thread:
        for size in (0, 1, 10, 64, 5000):
            with socket.create_connection(("127.0.0.1", control.port)) as stranger:
                stranger.sendall(draw.randbytes(size))
        joining = thread.submit(link.join, JOIN, PATIENCE_SECONDS)
        assert "it was heard" in str(refused_by(control, joining))


def refused_by(control: Control, joining: Future[Any]) -> BaseException | None:
    """Refuse a node that joins, once it is heard; returns what it raises."""
    while not joining.done():
        for heard in control.hear(0.05):
            control.say(heard.peer, Refused(reason="it was heard"))
    return joining.exception()


def test_a_message_that_is_too_long_for_a_node_is_refused_where_it_is_sent() -> None:
    too_long = Stop(epoch=0, reason="x" * MOST_BYTES)
    with (
        control_and_link() as (control, _),
        pytest.raises(BadInput, match="message Stop to a node takes 67,1"),
    ):
        control.say(b"node", too_long)


@pytest.mark.parametrize("address", LOOPBACKS)
def test_a_port_in_use_is_refused_with_its_number(address: str) -> None:
    control = Control(address, 0, LAUNCHER, {})
    try:
        with pytest.raises(BadInput, match=f"port {control.port} of {address} is in use"):
            Control(address, control.port, LAUNCHER, {})
    finally:
        control.close()


def test_a_node_at_an_address_of_another_machine_is_told() -> None:
    with pytest.raises(
        BadInput, match=r"192\.0\.2\.1 is not an address of this machine: correct the cluster file"
    ):
        reserved_port("192.0.2.1")  # of the addresses that no machine has


def _join_while_heard(link: ControlLink, control: Control) -> None:
    """Join on another thread, while the launcher listens."""
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(link.join, JOIN, PATIENCE_SECONDS)
        while not joining.done():
            assert list(control.hear(0.02)) == []
        joining.result()


# ---------------------------------------------------------------- traces


def recording(origin: int, *spans: tuple[int, int]) -> Recording:
    lane = LaneName(0, "accelerator")
    slices = [
        Slice(number, lane, TaskInfo("k", "k", "Kernel", "", ""), 0, start, end)
        for number, (start, end) in enumerate(spans)
    ]
    producers = [tuple(range(max(0, number - 1), number)) for number in range(len(spans))]
    return Recording(
        [lane],
        slices,
        producers,
        [MemorySample(0, "host", 0, 1, 1)],
        in_order=frozenset([lane]),
        origin=origin,
    )


def test_a_failure_that_names_a_path_of_other_bytes_can_be_sent() -> None:
    said: list[Any] = []
    NodeReports(said.append).failed("input", BadInput("cannot read /\udcff"))
    told = read_node(pack(said[0]))
    assert isinstance(told, Failed) and told.message == r"cannot read /\udcff"


def test_recordings_of_several_nodes_stand_on_one_clock() -> None:
    merged = merge_recordings(
        {0: recording(1000, (0, 10), (20, 30)), 1: recording(9005, (0, 10), (12, 40))}, {1: lambda _: 8000}
    )
    assert [(each.lane.rank, each.start, each.end) for each in merged.slices] == [
        (0, 0, 10),
        (1, 5, 15),
        (0, 20, 30),
        (1, 17, 45),
    ]
    assert merged.producers == [(), (), (0,), (1,)]
    assert [sample.time for sample in merged.memory] == [0, 5]
    assert merged.lanes == [LaneName(0, "accelerator"), LaneName(1, "accelerator")]
    assert merged.in_order == frozenset(merged.lanes)
    assert merged.origin == 1000

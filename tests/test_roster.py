"""The launcher's roster: a node is lost once all that it said is known, and each token counts once."""

from __future__ import annotations

import random
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from structlog.testing import capture_logs

from clusters import LAUNCHER, NODES, cluster, host
from moesched.cluster.cluster_file import Cluster
from moesched.cluster.control import Control
from moesched.cluster.control_link import ControlLink
from moesched.cluster.handshake import Expected
from moesched.cluster.launcher import Launch
from moesched.cluster.messages import PROTOCOL, Begin, Failed, JoinRequest, Order, Stop, Welcome
from moesched.cluster.node_jobs import NodeRun
from moesched.cluster.node_reports import NodeReports
from moesched.cluster.roster import Lost, Node, Roster
from moesched.cluster.token_log import TokenLog
from moesched.inputs.options import SizeOptions
from patience import PATIENCE_SECONDS

JOIN = JoinRequest(protocol=PROTOCOL, version="1.0", rank=0, model="abc", process=7)
FAILED = Failed(epoch=0, order=0, kind="input", message="too little memory")


class FakeProcess:
    """A process that ends when the test says so."""

    watched = True

    def __init__(self) -> None:
        self.code: int | None = None
        self.patience = 0.0

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.code = -9 if self.code is None else self.code

    def wait(self, timeout: float | None = None) -> int:
        self.patience = max(self.patience, timeout or 0)
        if self.code is None:
            raise subprocess.TimeoutExpired("node", timeout or 0)
        return self.code

    def last_words(self) -> str:
        return "moesched: too little memory"


def link_to(seated: Cluster) -> ControlLink:
    """A node's link to the launcher."""
    return ControlLink(seated.launcher, NODES[0], on_epoch=lambda _: None, on_gone=lambda: None)


class Rig:
    """A launcher's roster of one node, which has joined and is a member of the epoch."""

    def __init__(self, control: Control) -> None:
        self.process = FakeProcess()
        seated = cluster(host(0), port=control.port)
        welcome = Welcome(run=NodeRun(policy="ep_naive"), lost_after=PATIENCE_SECONDS, transport="zeromq")
        self.roster = Roster(seated, control, [self.process], Expected(version="1.0", model="abc"), welcome)
        self.seated = seated
        self.link = link_to(seated)
        self.heard: list[Any] = []
        with ThreadPoolExecutor(1) as thread:
            joining = thread.submit(self.link.join, JOIN, PATIENCE_SECONDS)
            self.look_until(joining.done)
            joining.result()
        self.roster.members = list(self.roster.nodes)

    def look_until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.heard += [replace(message, serial=0) for _, message in self.roster.hear(0.01)]
            self.roster.look_after()

    @property
    def node(self) -> Any:
        return self.roster.nodes[0]


@pytest.fixture
def rig() -> Iterator[Rig]:
    with closing(Control("127.0.0.1", 0, LAUNCHER, {NODES[0].public: "mac-0"})) as control:
        made = Rig(control)
        with closing(made.link):
            yield made


def test_the_last_message_of_a_node_counts_although_its_process_has_ended(rig: Rig) -> None:
    rig.process.code = 2
    rig.roster.look_after()
    rig.link.say(FAILED)
    rig.look_until(lambda: rig.heard)
    assert rig.heard == [FAILED]


def test_the_exit_code_of_a_node_counts_although_its_connection_ended_first(rig: Rig) -> None:
    rig.link.close()
    rig.look_until(lambda: rig.node.hung_up)
    rig.roster.look_after()
    rig.process.code = 2
    with pytest.raises(Lost):
        rig.roster.look_after()
    assert rig.node.lost == "its process ended with code 2, saying 'moesched: too little memory'"


def test_a_node_is_lost_once_process_and_connection_ended(rig: Rig) -> None:
    rig.link.say(FAILED)
    rig.link.close()
    rig.process.code = 1
    with pytest.raises(Lost):
        rig.look_until(lambda: False)
    assert rig.heard == [FAILED]


@pytest.mark.parametrize("ended_first", [True, False])
def test_a_node_that_comes_back_before_or_after_its_connection_ends_is_no_second_one(
    rig: Rig, ended_first: bool
) -> None:
    rig.process.code = -9
    if ended_first:
        rig.link.close()
    back = link_to(rig.seated)
    with closing(back), ThreadPoolExecutor(1) as thread:
        joining = thread.submit(back.join, JOIN, PATIENCE_SECONDS)
        assert [*rig.roster.hear(PATIENCE_SECONDS)] == []
        if not ended_first:
            rig.link.close()
        with pytest.raises(Lost):
            rig.look_until(lambda: False)
        rig.roster.members = []
        rig.look_until(joining.done)
        joining.result()
    assert rig.node.lost is None


def test_a_node_that_was_silent_for_too_long_and_goes_on_is_not_heard_any_more(rig: Rig) -> None:
    rig.node.ready, rig.node.heard = True, -1e9
    with pytest.raises(Lost):
        rig.roster.look_after()
    assert rig.node.lost == "silent for 15 s"
    rig.roster.members = []
    rig.link.say(FAILED)
    with capture_logs() as logs:
        rig.look_until(lambda: logs)
    assert rig.heard == []
    assert logs[0]["event"] == "dropped a message of a node that has not joined, or is lost"


def test_after_ctrl_c_a_node_that_goes_on_is_killed_within_half_a_second(rig: Rig) -> None:
    with capture_logs() as logs:
        rig.roster.end(interrupted=True)
    assert (rig.process.code, rig.process.patience <= 0.5, logs) == (-9, True, [])


# -- tokens when a node is lost --------------------------------------------------------------------

PROMPTS = [[1, 2, 3], [4, 5], [6]]
NEW_TOKENS = 6


def next_token(text: Sequence[int]) -> int:
    """The token that follows a text, on every node; a token twice or not at all changes all later ones."""
    return (sum(text) * 31 + len(text)) % 97


def whole(prompt: Sequence[int]) -> list[int]:
    text = list(prompt)
    for _ in range(NEW_TOKENS):
        text.append(next_token(text))
    return text[len(prompt) :]


class LosingRoster:
    """Nodes that hold all experts, say their tokens in an order that is drawn, and of which one is lost.

    Args:
        lost: the rank of that node.
        at: number of messages of tokens after which it is lost; 0 while the nodes plan.
        together: requests whose tokens come in one message.
    """

    def __init__(self, draw: random.Random, lost: int, at: int, together: int) -> None:
        self.nodes = [Node(host, FakeProcess()) for host in cluster().hosts]
        for node in self.nodes:
            node.peer = b"connected"
        self.members: list[Node] = []
        self._draw = draw
        self._lost, self._left = self.nodes[lost], at
        self._together = together
        self._said: dict[int, deque[Any]] = {node.host.rank: deque() for node in self.nodes}
        self._reports = {rank: NodeReports(said.append) for rank, said in self._said.items()}

    def hear(self, seconds: float) -> Iterator[tuple[Node, Any]]:
        speaking = [node for node in self.nodes if node.peer and self._said[node.host.rank]]
        if speaking:
            node = self._draw.choice(speaking)
            message = self._said[node.host.rank].popleft()
            self._left -= type(message).__name__ == "Tokens"
            yield node, message

    def look_after(self) -> None:
        if self._left <= 0:
            self._lost.lost, self._lost.peer = "its process ended", None
        if self._lost.lost and self._lost in self.members:
            raise Lost(self._lost)

    def say(self, node: Node, message: Any) -> None:
        said, reports = self._said[node.host.rank], self._reports[node.host.rank]
        match message:
            case Order():
                reports.order = message
                reports.prepared(1, SizeOptions(), [[0, 1]] * len(message.members))
            case Begin():
                reports.begin()
                reports.loaded()
                self._compute(reports)
            case Stop():
                kept = self._draw.randint(0, len(said))
                while len(said) > kept:
                    said.pop()
                said.append(Failed(epoch=message.epoch, order=0, kind="stopped", message=message.reason))

    def _compute(self, reports: NodeReports) -> None:
        order = reports.order
        assert order is not None
        texts = [list(prompt) for prompt in order.prompts]
        for _ in range(order.new_tokens):
            for start in range(0, len(texts), self._together):
                fresh = {}
                for place in range(start, min(start + self._together, len(texts))):
                    texts[place].append(next_token(texts[place]))
                    fresh[order.first_request + place] = [texts[place][-1]]
                reports.tokens(fresh, [], 0.0)
        reports.done("")


@given(st.randoms(use_true_random=False), st.integers(0, 1), st.integers(0, 40), st.integers(1, 3))
@example(random.Random(0), 0, 0, 1)
def test_whoever_is_lost_however_far_the_others_are_no_token_is_counted_twice_or_left_out(
    draw: random.Random, lost: int, at: int, together: int
) -> None:
    roster: Any = LosingRoster(draw, lost, at, together)
    log = TokenLog(PROMPTS, NEW_TOKENS, [])
    Launch(roster, log, SizeOptions()).run()
    assert log.tokens == [whole(prompt) for prompt in PROMPTS]

"""The launcher's roster: a node is lost once all that it said is known."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from clusters import LAUNCHER, NODES, cluster, host
from moesched.cluster.control import Control
from moesched.cluster.control_link import ControlLink
from moesched.cluster.handshake import Expected
from moesched.cluster.messages import PROTOCOL, Failed, JoinRequest, Welcome
from moesched.cluster.node_jobs import NodeRun
from moesched.cluster.roster import Lost, Roster
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


class Rig:
    """A launcher's roster of one node, which has joined and is a member of the epoch."""

    def __init__(self, control: Control) -> None:
        self.process = FakeProcess()
        seated = cluster(host(0), port=control.port)
        welcome = Welcome(run=NodeRun(policy="ep_naive"), lost_after=PATIENCE_SECONDS, transport="zeromq")
        self.roster = Roster(seated, control, [self.process], Expected(version="1.0", model="abc"), welcome)
        self.link = ControlLink(
            seated.launcher,
            NODES[0],
            on_epoch=lambda _: None,
            on_gone=lambda: None,
        )
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

"""The roster of a launch: which nodes are here, who may come in, who is lost, and why."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from time import perf_counter_ns

import structlog

from moesched.cluster.clocks import ClockMeter, ClockOffset
from moesched.cluster.cluster_file import Cluster, Host
from moesched.cluster.control import Control, Heard, Peer
from moesched.cluster.handshake import Expected, refusal
from moesched.cluster.members import GRACE_SECONDS, ByOthers, Process
from moesched.cluster.messages import (
    Done,
    Failed,
    JoinRequest,
    LauncherSays,
    Loading,
    Piece,
    Ping,
    Pong,
    Prepared,
    Quit,
    Refused,
    Tokens,
    Welcome,
)
from moesched.errors import BadInput, NodeLost

_log = structlog.get_logger(__name__)

PING_SECONDS = 0.1
LOADING_SECONDS = 60.0
LAST_WORDS_SECONDS = 0.1
"""How long a process may take to end, once its connection has, so that its code and words are known."""

OfOrder = Prepared | Loading | Tokens | Piece | Done | Failed
"""What a node says of an order."""


class Node:
    """What the launcher knows of one node."""

    def __init__(self, host: Host, process: Process) -> None:
        self.host = host
        self.process = process
        self.peer: Peer | None = None
        self.heard = 0.0
        self.clock = ClockMeter()
        self.ready = False
        """Whether all that takes long to load has been loaded."""
        self.prepared: Prepared | None = None
        self.done: Done | None = None
        self.loading = (0, 0)
        self.lost: str | None = None
        self.pieces: dict[tuple[int, str], list[bytes]] = {}


class Lost(Exception):
    """A member of the epoch is gone."""

    def __init__(self, node: Node) -> None:
        super().__init__(str(node.host))
        self.node = node


class Back(Exception):
    """A node that was lost is here again."""


class Roster:
    """The nodes of a cluster, and those of them that are members of the epoch.

    Args:
        processes: the nodes', by rank.
        expected: what each node must have in common with the launcher.
        welcome: the answer to those who have.

    Attributes:
        nodes: all, by rank.
        members: those that take part; none before the run.
    """

    def __init__(
        self,
        cluster: Cluster,
        control: Control,
        processes: Sequence[Process],
        expected: Expected,
        welcome: Welcome,
    ) -> None:
        self.nodes = [Node(host, process) for host, process in zip(cluster.hosts, processes, strict=True)]
        self.members: list[Node] = []
        self._cluster = cluster
        self._control = control
        self._expected = expected
        self._welcome = welcome
        self._pings = 0
        self._next_ping = 0.0

    @property
    def clocks(self) -> dict[int, ClockOffset]:
        """By how much each node's clock is ahead of this one's, as far as it is known."""
        return {node.host.rank: node.clock.best for node in self.nodes if node.clock.best is not None}

    @property
    def lost(self) -> dict[int, str]:
        """Why nodes are not here any more, by rank."""
        return {node.host.rank: node.lost for node in self.nodes if node.lost is not None}

    def hear(self, seconds: float) -> Iterator[tuple[Node, OfOrder]]:
        """What nodes say of orders within some time; all else that they say is seen to here.

        Raises:
            BadInput: a node is refused before the run.
        """
        for heard in self._control.hear(seconds):
            message = heard.message
            if isinstance(message, JoinRequest):
                self._let_in(heard, message)
                continue
            node = next((node for node in self.nodes if node.peer == heard.peer), None)
            if node is None:
                _log.warning("dropped a message of one that has not joined", peer=heard.address)
                continue
            node.heard = time.monotonic()
            if isinstance(message, Pong):
                node.clock.answer(message.number, message.clock, perf_counter_ns())
            else:
                yield node, message

    def look_after(self) -> None:
        """Notice who is gone.

        Raises:
            Lost: a member.
            Back: none of them, and one that was lost is here again.
            BadInput, NodeLost: a node before the run; the first where it said that what it was given cannot be used.
        """
        now = time.monotonic()
        if now >= self._next_ping:
            self._ping(now)
        for peer in self._control.gone():
            for node in self.nodes:
                if node.peer == peer:
                    self._lose(node, "its connection ended")
        for node in self.nodes:
            if node.lost is None and node.process.poll() is not None:
                self._lose(node, "its process ended")
            elif node.peer is not None and now - node.heard > self._patience(node):
                self._lose(node, f"silent for {self._patience(node):g} s")
        for node in self.members:
            if node.lost is not None:
                raise Lost(node)
        if self.members and any(node.peer is not None and node not in self.members for node in self.nodes):
            raise Back

    def say(self, node: Node, message: LauncherSays) -> None:
        """Send a message; one to a node that is not here is dropped."""
        if node.peer is not None:
            self._control.say(node.peer, message)

    def end(self) -> None:
        """Send all nodes home, and see that none stays behind."""
        for node in self.nodes:
            self.say(node, Quit())
        deadline = time.monotonic() + 2 * GRACE_SECONDS
        for node in self.nodes:
            try:
                node.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                if node.process.poll() is None and not isinstance(node.process, ByOthers):
                    _log.warning("killed, as it did not end by itself", node=str(node.host))
                node.process.kill()

    def _patience(self, node: Node) -> float:
        """Seconds of silence after which a node counts as lost; loading libraries may silence it for a while."""
        lost_after = self._cluster.lost_after
        return lost_after if node.ready else max(lost_after, LOADING_SECONDS)

    def _let_in(self, heard: Heard, join: JoinRequest) -> None:
        reason = refusal(join, heard.key, self._cluster, self._expected)
        node = self.nodes[join.rank] if reason is None else None
        if node is not None and node.peer is not None:
            reason = f"a node of rank {join.rank} is here already: give each node a rank of its own"
        if reason is not None or node is None:
            _log.warning("refused", peer=heard.address, why=reason)
            self._control.say(heard.peer, Refused(reason=reason or ""))
            known = [each for each in self.nodes if each.host.key == heard.key and each.peer is None]
            if known and not self.members:
                raise BadInput(f"{known[0].host}: {reason}")
            return
        if node.lost is not None:
            _log.warning("a node is back", node=str(node.host))
            node.process, node.ready, node.lost = ByOthers(), False, None
        node.peer, node.heard = heard.peer, time.monotonic()
        node.clock = ClockMeter()
        self._control.say(heard.peer, self._welcome)

    def _lose(self, node: Node, why: str) -> None:
        """A node is gone: note why, as far as can be known."""
        node.lost, node.peer = why, None
        with suppress(subprocess.TimeoutExpired):
            code = node.process.wait(LAST_WORDS_SECONDS)
            *_, words = ("", *node.process.last_words().split("\n"))
            node.lost = f"its process ended with code {code}" + (f", saying {words!r}" if words else "")
            if code == 2 and words and not self.members:
                raise BadInput(f"{node.host}: {words.removeprefix('moesched: ')}")
        node.process.kill()  # so that it does not come back half alive
        if not self.members:
            raise NodeLost(f"{node.host} was lost before the run began: {node.lost}", node.host.rank)

    def _ping(self, now: float) -> None:
        self._pings += 1
        self._next_ping = now + PING_SECONDS
        for node in self.nodes:
            if node.peer is not None:
                node.clock.ask(self._pings, perf_counter_ns())
                self.say(node, Ping(number=self._pings))

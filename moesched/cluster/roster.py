"""The nodes of a launch, as the launcher sees them: admits nodes that ask to join, and detects lost ones."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns

from moesched.cluster.build import Build, differences, library_refusal
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
    Loaded,
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
from moesched.system.logs import Log

_log = Log(__name__)

PING_SECONDS = 0.1
LOADING_SECONDS = 60.0
"""Least seconds of silence after which a node counts as lost while it opens its device."""
ENDING_SECONDS = 5.0
"""Seconds from the end of a node's process or connection until the node counts as lost."""
LEAVING_SECONDS = 0.3
"""Seconds that nodes have to end by themselves after Ctrl-C, once their results have arrived."""

OfOrder = Prepared | Loading | Loaded | Tokens | Piece | Done | Failed
"""Message of a node about an order."""


class Node:
    """The launcher's view of one node: its process, connection, messages, progress, and the reason if it is lost."""

    def __init__(self, host: Host, process: Process) -> None:
        self.host = host
        self.process = process
        self.peer: Peer | None = None
        self.heard = 0.0
        self.clock = ClockMeter()
        self.answered = False
        """True if the node was admitted or refused, so that it will end by itself."""
        self.ready = False
        """True if the node has opened its device, which takes long."""
        self.prepared: Prepared | None = None
        self.done: Done | None = None
        self.loading = (0, 0)
        self.loaded = False
        """True if the node has loaded its weights, and waits for the others before its first exchange."""
        self.hung_up = False
        """True if the node's connection has ended."""
        self.ending_since: float | None = None
        """Time at which the node's process or connection was first seen to have ended; None if neither has."""
        self.lost: str | None = None
        """The reason why the node is lost; None if it is not."""
        self.pieces: dict[tuple[int, str], list[bytes]] = {}


class Lost(Exception):
    """Raised when a node of the current epoch, a period in which the members stay the same, is lost."""

    def __init__(self, node: Node) -> None:
        super().__init__(str(node.host))
        self.node = node


class Back(Exception):
    """Raised when a lost node has joined again."""


class Roster:
    """All nodes of a cluster; its members are those nodes that currently carry out orders together, in one epoch.

    Args:
        processes: the nodes' processes, by rank.
        expected: the launcher's version and model, which each node must share.
        welcome: the answer to a node that is admitted.

    Attributes:
        nodes: all nodes, by rank.
        members: nodes that take part in the current epoch; empty before the run.
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
        self._builds: dict[int, Build] = {}
        """Builds of nodes that have joined, by rank."""
        self._early: list[tuple[Heard, JoinRequest]] = []
        """Join requests of nodes that came back before they were noted as lost."""

    @property
    def clocks(self) -> dict[int, ClockOffset]:
        """The best measured offset of each node's clock, by rank; unmeasured nodes are left out."""
        return {node.host.rank: node.clock.best for node in self.nodes if node.clock.best is not None}

    @property
    def ahead(self) -> dict[int, Callable[[int], int]]:
        """By rank, a function of a time on the node's clock that returns its lead over the launcher's clock in ns."""
        return {node.host.rank: node.clock.ahead_at for node in self.nodes}

    @property
    def lost(self) -> dict[int, str]:
        """Reasons why nodes are lost, by rank."""
        return {node.host.rank: node.lost for node in self.nodes if node.lost is not None}

    def hear(self, seconds: float) -> Iterator[tuple[Node, OfOrder]]:
        """Wait up to `seconds` for messages; yield those about orders, and handle join requests and answers to pings.

        Raises:
            BadInput: a node is refused before the run.
        """
        early, self._early = self._early, []
        for heard, join in early:
            self._admit(heard, join)
        for heard in self._control.hear(seconds):
            message = heard.message
            if isinstance(message, JoinRequest):
                self._admit(heard, message)
                continue
            node = next((node for node in self.nodes if node.peer == heard.peer), None)
            if node is None:
                if not isinstance(
                    message, Pong
                ):  # a node that was paused answers all pings at once when it goes on
                    _log.warning(
                        "dropped a message of a node that has not joined, or is lost", peer=heard.address
                    )
                continue
            node.heard = time.monotonic()
            if isinstance(message, Pong):
                node.clock.answer(message.number, message.clock, perf_counter_ns())
            else:
                yield node, message

    def look_after(self) -> None:
        """Detect lost nodes and nodes that came back, and send pings.

        Raises:
            Lost: a member is lost.
            Back: no member is lost, and a node that was lost has joined again.
            BadInput: before the run, a node ended because of bad input.
            NodeLost: before the run, a node was lost for another reason.
        """
        now = time.monotonic()
        if now >= self._next_ping:
            self._ping(now)
        for peer in self._control.gone():
            for node in self.nodes:
                if node.peer == peer:
                    node.peer, node.hung_up = None, True
        for node in self.nodes:
            if node.lost is None and (why := self._why_lost(node, now)):
                self._lose(node, why)
        for node in self.members:
            if node.lost is not None:
                raise Lost(node)
        if self.members and any(node.peer is not None and node not in self.members for node in self.nodes):
            raise Back

    def say(self, node: Node, message: LauncherSays) -> None:
        """Send a message to a node; the message is dropped if the node is not connected."""
        if node.peer is not None:
            self._control.say(node.peer, message)

    def end(self, *, interrupted: bool = False) -> None:
        """Tell all nodes to end; kill those that do not end in time, or that have not joined yet.

        interrupted: whether Ctrl-C ended the run, so that nodes get less time.
        """
        for node in self.nodes:
            if not node.answered:
                node.process.kill()
            self.say(node, Quit())
        patience = LEAVING_SECONDS if interrupted else GRACE_SECONDS + ENDING_SECONDS
        deadline = time.monotonic() + patience
        for node in self.nodes:
            try:
                node.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                if node.process.watched and node.process.poll() is None and not interrupted:
                    _log.warning("killed, as it did not end by itself", node=str(node.host))
                node.process.kill()

    def _patience(self, node: Node) -> float:
        """Return the seconds of silence after which a node counts as lost; more while the node opens its device."""
        lost_after = self._cluster.lost_after
        return lost_after if node.ready else max(lost_after, LOADING_SECONDS)

    def _why_lost(self, node: Node, now: float) -> str | None:
        """Return the reason why a node counts as lost; None if it does not.

        While process and connection last, a node is lost if it is silent for too long. If one of them has ended, the
        node is lost once both have ended, or after `ENDING_SECONDS`. This wait lets the node's last messages arrive,
        and its process end with an exit code. If the launcher cannot see the process, the end of the connection alone
        is enough.
        """
        ended = node.process.poll() is not None
        if not ended and not node.hung_up:
            silent = node.peer is not None and now - node.heard > self._patience(node)
            return f"silent for {self._patience(node):g} s" if silent else None
        if node.ending_since is None:
            node.ending_since = now
        is_over = node.peer is None and (ended or not node.process.watched)
        if is_over or now - node.ending_since > ENDING_SECONDS:
            return "its process ended" if ended else "its connection ended"
        return None

    def _ended(self, node: Node) -> bool:
        """Test whether the launcher has seen the end of a node's process or of its connection."""
        return node.process.poll() is not None or node.hung_up or self._control.has_ended(node.peer)

    def _admit(self, heard: Heard, join: JoinRequest) -> None:
        reason = refusal(join, heard.key, self._cluster, self._expected) or self._build_refusal(join)
        node = self.nodes[join.rank] if reason is None else None
        if node is not None and self._ended(node) and (node.lost is None or node in self.members):
            self._early.append((heard, join))
            return
        if node is not None and node.peer is not None:
            reason = f"a node of rank {join.rank} has joined already: give each node its own rank"
        if reason is not None or node is None:
            _log.warning("refused", peer=heard.address, why=reason)
            self._control.say(heard.peer, Refused(reason=reason or ""))
            known = [each for each in self.nodes if each.host.key == heard.key and each.peer is None]
            for each in known:
                each.answered = True
            if known and not self.members:
                raise BadInput(f"{known[0].host}: {reason}")
            return
        if node.lost is not None:
            _log.warning("a node is back", node=str(node.host))
            node.process, node.ready, node.lost = ByOthers(), False, None
            node.hung_up, node.ending_since = False, None
        node.peer, node.heard, node.answered = heard.peer, time.monotonic(), True
        node.clock, self._builds[join.rank] = ClockMeter(), join.build
        self._warn_of_other_builds(node)
        self._control.say(heard.peer, self._welcome)

    def _build_refusal(self, join: JoinRequest) -> str | None:
        device = self._welcome.run.device
        reasons = (
            library_refusal(device, join.build, self._builds[other.host.rank], str(other.host))
            for other in self.nodes
            if other.host.rank != join.rank and other.peer is not None
        )
        return next(filter(None, reasons), None)

    def _warn_of_other_builds(self, node: Node) -> None:
        for other in self.nodes:
            if other.peer is not None and (
                found := differences(*(self._builds[each.host.rank] for each in (node, other)))
            ):
                _log.warning(
                    "nodes differ: if they round differently, their tokens will differ and the run will end",
                    nodes=[str(node.host), str(other.host)],
                    differ=found,
                )
                return

    def _lose(self, node: Node, why: str) -> None:
        """Mark a node as lost because of `why`, and kill its process; before the run, raise BadInput or NodeLost."""
        self.say(
            node,
            Refused(reason=f"{node.host} was {why}, and the others went on: start it again to take part"),
        )
        node.lost, node.peer = why, None
        code = node.process.poll()
        if code is not None:
            *_, words = ("", *node.process.last_words().split("\n"))
            node.lost = f"its process ended with code {code}" + (f", saying {words!r}" if words else "")
            if code == 2 and words and not self.members:
                raise BadInput(f"{node.host}: {words.removeprefix('moesched: ')}")
        node.process.kill()  # a node that hangs must not come back later
        if not self.members:
            raise NodeLost(f"{node.host} was lost before the run began: {node.lost}", node.host.rank)

    def _ping(self, now: float) -> None:
        self._pings += 1
        self._next_ping = now + PING_SECONDS
        for node in self.nodes:
            if node.peer is not None:
                node.clock.ask(self._pings, perf_counter_ns())
                self.say(node, Ping(number=self._pings))

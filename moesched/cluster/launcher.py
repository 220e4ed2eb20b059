"""The launcher: starts the nodes of a cluster, hands out the work, hears what comes of it, and copes with losses.

Every order goes out in an epoch, which all members carry out together or not at all. Whoever is lost ends the epoch;
the others go on in the next one from the tokens so far, if they hold all experts between them.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter_ns

import msgspec
import structlog

from moesched.cluster.clocks import ClockMeter, ClockOffset
from moesched.cluster.cluster_file import Cluster, Host
from moesched.cluster.control import Control, Heard, Peer
from moesched.cluster.handshake import Expected, refusal
from moesched.cluster.members import GRACE_SECONDS, ByOthers, Process
from moesched.cluster.messages import (
    Begin,
    Done,
    Failed,
    Join,
    LauncherSays,
    Loading,
    Member,
    Order,
    Piece,
    Ping,
    Pong,
    Prepared,
    Quit,
    Refused,
    Sizes,
    Stop,
    Tokens,
    Welcome,
)
from moesched.cluster.slowness import SlowNodes
from moesched.cluster.token_log import Remainder, TokenLog
from moesched.errors import BadInput, MoeschedError, NodeLost, TransportError

_log = structlog.get_logger(__name__)

GLANCE_SECONDS = 0.02
"""How often the launcher looks after the processes."""
PING_SECONDS = 0.1
JOIN_SECONDS = 60.0
LOADING_SECONDS = 60.0
LAST_WORDS_SECONDS = 0.1
"""How long a process may take to end, once its connection has, so that its code and words are known."""
PARTING_SECONDS = 1.0
"""What nodes have to send what they have when an epoch ends before its time."""


class Events:
    """What a launch tells of. Every method does nothing here."""

    def loading(self, done: int, total: int) -> None:
        """So many of the pages that stay have been loaded, on all nodes."""

    def tokens(self, fresh: dict[int, list[int]]) -> None:
        """New tokens, by request."""


class Finished(msgspec.Struct):
    """What a node sent of one order: texts that the jobs can read, by what they are."""

    rank: int
    order: int
    what: str
    data: bytes


class Node:
    """What the launcher knows of one node."""

    def __init__(self, host: Host, process: Process) -> None:
        self.host = host
        self.process = process
        self.peer: Peer | None = None
        self.epoch = -1
        """The first epoch that it can take part in."""
        self.heard = 0.0
        self.clock = ClockMeter()
        self.prepared: Prepared | None = None
        self.done: Done | None = None
        self.loading = (0, 0)
        self.lost: str | None = None
        self.pieces: dict[tuple[int, str], list[bytes]] = {}


class _Lost(Exception):
    """A member of the epoch is gone."""

    def __init__(self, node: Node) -> None:
        super().__init__(str(node.host))
        self.node = node


class _Back(Exception):
    """A node that was lost is here again."""


class Launch:
    """One run on a cluster.

    Args:
        processes: the nodes', by rank.
        expected: what each node must have in common with the launcher.

    Attributes:
        finished: what nodes sent of their orders, in the order in which it came.
        epoch: how often the members changed.
        failure: why the run ended early, with the tokens so far; None where nothing was wrong.
    """

    def __init__(
        self,
        cluster: Cluster,
        control: Control,
        processes: Sequence[Process],
        expected: Expected,
        welcome: Welcome,
        log: TokenLog,
        events: Events,
    ) -> None:
        self.finished: list[Finished] = []
        self.epoch = 0
        self.failure: str | None = None
        self._cluster = cluster
        self._control = control
        self._nodes = [Node(host, process) for host, process in zip(cluster.hosts, processes, strict=True)]
        self._expected = expected
        self._welcome = welcome
        self._tokens = log
        self._events = events
        self._members: list[Node] = []
        self._order = -1
        self._begun = False
        self._held: dict[int, frozenset[int]] = {}
        """The experts of each node by rank, as they were placed last."""
        self._slow = SlowNodes([])
        self._pings = 0
        self._next_ping = 0.0
        self._over = False

    @property
    def clocks(self) -> dict[int, ClockOffset]:
        """By how much each node's clock is ahead of this one's, as far as it is known."""
        return {node.host.rank: node.clock.best for node in self._nodes if node.clock.best is not None}

    @property
    def lost(self) -> dict[int, str]:
        """Why nodes are not here any more, by rank."""
        return {node.host.rank: node.lost for node in self._nodes if node.lost is not None}

    def run(self) -> None:
        """Have all tokens made.

        Raises:
            BadInput: a node refuses, or is refused.
            NodeLost: a node is gone, and the others cannot do without it.
            MoeschedError: a node failed for a reason that it tells, or nodes came to different tokens.
            KeyboardInterrupt: after the nodes have sent what there was so far.
        """
        self._wait_for(lambda: all(node.peer for node in self._nodes), JOIN_SECONDS, "join")
        self._members = list(self._nodes)
        try:
            while self.failure is None and (remainder := self._tokens.remainder()) is not None:
                self._carry_out(remainder)
        except KeyboardInterrupt:
            self._stop("the run was interrupted")
            raise

    def end(self) -> None:
        """Send all nodes home, and see that none stays behind."""
        self._over = True
        for node in self._nodes:
            self._say(node, Quit())
        deadline = time.monotonic() + 2 * GRACE_SECONDS
        for node in self._nodes:
            try:
                node.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                if node.process.poll() is None and not isinstance(node.process, ByOthers):
                    _log.warning("killed, as it did not end by itself", node=str(node.host))
                node.process.kill()

    # -- orders ------------------------------------------------------------------------------------

    def _carry_out(self, remainder: Remainder) -> None:
        """One order, by those who are here; where that changes, the caller asks again what is left."""
        self._order += 1
        try:
            self._prepare(remainder)
            self._wait_for(lambda: self.failure is not None or all(node.done for node in self._members))
        except _Lost as error:
            self._go_on_without(error.node)
        except _Back:
            self._stop("a node is back")
            self._renew([node for node in self._nodes if node.peer is not None])
        else:
            if self.failure is not None:
                self._stop(self.failure)
                return
            self._compare([node.done for node in self._members if node.done is not None])

    def _prepare(self, remainder: Remainder) -> None:
        members = self._members
        self._begun = False
        order = Order(
            epoch=self.epoch,
            order=self._order,
            members=[node.host.rank for node in members],
            first_request=remainder.first_request,
            prompts=remainder.prompts,
            new_tokens=remainder.new_tokens,
            sizes=self._expected.sizes,
        )
        for node in members:
            node.prepared = node.done = None
            node.loading = (0, 0)
            self._say(node, order)
        self._wait_for(lambda: all(node.prepared for node in members))
        plans = [node.prepared for node in members if node.prepared is not None]
        self._note_placement(plans)
        begin = Begin(
            epoch=self.epoch,
            order=self._order,
            members=[
                Member(rank=node.host.rank, address=node.host.address, port=plan.port, key=node.host.key)
                for node, plan in zip(members, plans, strict=True)
            ],
            sizes=smallest([plan.sizes for plan in plans]),
        )
        self._slow = SlowNodes([node.host.rank for node in members])
        self._begun = True
        for node in members:
            self._say(node, begin)

    def _go_on_without(self, gone: Node) -> None:
        """Have the others go on, or say that they cannot."""
        _log.warning("a node is lost", node=str(gone.host), why=gone.lost)
        left = self._members = [node for node in self._members if node is not gone]
        self._stop(f"{gone.host} is lost")
        if self._tokens.remainder() is None:
            return  # it went when all was done
        everywhere = frozenset().union(*self._held.values())
        here = frozenset().union(*(self._held.get(node.host.rank, ()) for node in left))
        if not here or here < everywhere:
            raise NodeLost(
                f"{gone.host} is lost: {gone.lost}; the others do not hold its experts, {self._tokens.count} tokens "
                "were made",
                gone.host.rank,
            )
        self._renew(left)

    def _renew(self, members: list[Node]) -> None:
        self.epoch += 1
        self._members = members
        _log.warning("going on", nodes=[node.host.rank for node in members], epoch=self.epoch)

    def _stop(self, reason: str) -> None:
        """End the epoch, and give the members a moment to send what they have."""
        asked = [node for node in self._members if node.peer is not None and node.done is None]
        begun, self._begun = self._begun, False
        for node in asked:
            self._say(node, Stop(epoch=self.epoch, reason=reason))
        deadline = time.monotonic() + PARTING_SECONDS
        while (
            begun and time.monotonic() < deadline and any(not node.done and not node.lost for node in asked)
        ):
            with suppress(
                _Lost, _Back, MoeschedError
            ):  # one trouble at a time: what still matters shows again
                self._look(GLANCE_SECONDS)

    def _compare(self, ends: Sequence[Done]) -> None:
        if len({end.digest for end in ends}) > 1:
            said = "; ".join(
                f"node {node.host.rank}: {node.done and node.done.digest}" for node in self._members
            )
            raise TransportError(
                f"the nodes came to different tokens: {said}: give all of them the same build"
            )

    def _note_placement(self, plans: Sequence[Prepared]) -> None:
        placement = plans[0].placement
        ranks = [node.host.rank for node in self._members]
        if placement:
            self._held = {rank: frozenset(held) for rank, held in zip(ranks, placement, strict=True)}
        for node, plan in zip(self._members, plans, strict=True):
            if plan.placement != placement:
                raise BadInput(
                    f"{node.host} would place the experts otherwise than {self._members[0].host}: give all nodes the "
                    "same memory in the cluster file"
                )

    # -- what comes in -----------------------------------------------------------------------------

    def _wait_for(self, condition: Callable[[], bool], seconds: float = float("inf"), what: str = "") -> None:
        """Look after everything until something is so.

        Raises:
            BadInput: it is not so in time.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            self._look(GLANCE_SECONDS)
            if time.monotonic() > deadline:
                missing = ", ".join(str(node.host) for node in self._nodes if node.peer is None)
                raise BadInput(
                    f"{missing} did not {what} in {seconds:g} s: start it, or look whether it is reached"
                )

    def _look(self, seconds: float) -> None:
        """Take in what comes within some time, and look after processes and connections."""
        for heard in self._control.hear(seconds):
            self._take(heard)
        now = time.monotonic()
        if now >= self._next_ping:
            self._ping(now)
        for peer in self._control.gone():
            for node in self._nodes:
                if node.peer == peer:
                    self._lose(node, "its connection ended")
        for node in self._nodes:
            if node.lost is None and node.process.poll() is not None:
                self._lose(node, "its process ended")
            elif node.peer is not None and now - node.heard > self._patience(node):
                self._lose(node, f"silent for {self._patience(node):g} s")
        self._tell_changes()

    def _patience(self, node: Node) -> float:
        """Seconds of silence after which a node counts as lost; loading libraries may silence it for a while."""
        lost_after = self._cluster.lost_after
        return lost_after if node.prepared else max(lost_after, LOADING_SECONDS)

    def _tell_changes(self) -> None:
        """Raises _Lost or _Back where the members are not those who are here."""
        for node in self._members:
            if node.lost is not None:
                raise _Lost(node)
        if self._members and any(node.peer is not None and node not in self._members for node in self._nodes):
            raise _Back

    def _take(self, heard: Heard) -> None:
        if isinstance(heard.message, Join):
            self._let_in(heard, heard.message)
            return
        node = next((node for node in self._nodes if node.peer == heard.peer), None)
        if node is None:
            _log.warning("dropped a message of one that has not joined", peer=heard.address)
            return
        node.heard = time.monotonic()
        message = heard.message
        if isinstance(message, Pong):
            node.clock.answer(message.number, message.clock, perf_counter_ns())
        elif message.epoch == self.epoch:
            self._take_in(node, message)

    def _take_in(self, node: Node, message: Prepared | Loading | Tokens | Piece | Done | Failed) -> None:
        """What a member says of the epoch."""
        match message:
            case Prepared():
                node.prepared = message
            case Loading():
                node.loading = (message.done, message.total)
                self._events.loading(*map(sum, zip(*(each.loading for each in self._members), strict=True)))
            case Tokens():
                self._take_tokens(node, message)
            case Piece():
                self._take_piece(node, message)
            case Done():
                node.done = message
                self.failure = self.failure or message.failure or None
            case Failed():
                node.done = Done(epoch=message.epoch, order=self._order, digest="")
                self._failed(node, message)

    def _take_tokens(self, node: Node, message: Tokens) -> None:
        if node is self._members[0]:
            fresh = self._tokens.add(message.tokens, message.ended)
            if fresh:
                self._events.tokens(fresh)
        slow = self._slow.computed(node.host.rank, message.seconds - message.waited)
        for rank, factor in slow.items():
            _log.warning(
                "a node is slow: the others wait for it",
                node=str(self._nodes[rank].host),
                factor=round(factor, 1),
            )

    def _take_piece(self, node: Node, piece: Piece) -> None:
        parts = node.pieces.setdefault((piece.order, piece.what), [])
        parts.append(piece.data)
        if piece.last:
            del node.pieces[piece.order, piece.what]
            self.finished.append(Finished(node.host.rank, piece.order, piece.what, b"".join(parts)))

    def _failed(self, node: Node, message: Failed) -> None:
        """A member gave up: for a reason of its own, or since another one is gone, which shows in a moment."""
        said = f"{node.host}: {message.message}"
        if message.kind == "input":
            raise BadInput(said)
        if message.kind == "stopped":
            return
        deadline = time.monotonic() + PARTING_SECONDS
        while message.kind == "lost" and time.monotonic() < deadline:
            self._look(GLANCE_SECONDS)
        if message.gone:
            raise NodeLost(said, message.gone[0])
        raise MoeschedError(said)

    # -- who is here -------------------------------------------------------------------------------

    def _let_in(self, heard: Heard, join: Join) -> None:
        reason = refusal(join, heard.key, self._cluster, self._expected)
        node = self._nodes[join.rank] if reason is None else None
        if node is not None and node.peer is not None:
            reason = f"a node of rank {join.rank} is here already: give each node a rank of its own"
        if reason is not None or node is None:
            _log.warning("refused", peer=heard.address, why=reason)
            self._control.say(heard.peer, Refused(reason=reason or ""))
            known = [each for each in self._nodes if each.host.key == heard.key and each.peer is None]
            if known and not self._members:
                raise BadInput(f"{known[0].host}: {reason}")
            return
        if node.lost is not None:
            _log.warning("a node is back", node=str(node.host))
            node.process, node.prepared, node.lost = ByOthers(), None, None
        node.peer, node.heard = heard.peer, time.monotonic()
        node.clock = ClockMeter()
        self._control.say(heard.peer, self._welcome)

    def _lose(self, node: Node, why: str) -> None:
        """A node is gone: note why, as far as can be known."""
        node.lost, node.peer = why, None
        if self._over:
            return
        with suppress(subprocess.TimeoutExpired):
            code = node.process.wait(LAST_WORDS_SECONDS)
            *_, words = ("", *node.process.last_words().split("\n"))
            node.lost = f"its process ended with code {code}" + (f", saying {words!r}" if words else "")
            if code == 2 and words and not self._members:
                raise BadInput(f"{node.host}: {words.removeprefix('moesched: ')}")
        node.process.kill()  # so that it does not come back half alive
        if not self._members:
            raise NodeLost(f"{node.host} was lost before the run began: {node.lost}", node.host.rank)

    def _ping(self, now: float) -> None:
        self._pings += 1
        self._next_ping = now + PING_SECONDS
        for node in self._nodes:
            if node.peer is not None:
                node.clock.ask(self._pings, perf_counter_ns())
                self._say(node, Ping(number=self._pings))

    def _say(self, node: Node, message: LauncherSays) -> None:
        if node.peer is not None:
            self._control.say(node.peer, message)


def smallest(sizes: Sequence[Sizes]) -> Sizes:
    """Sizes that fit every node."""

    def least(values: Sequence[int | None]) -> int | None:
        return min((each for each in values if each is not None), default=None)

    return Sizes(
        batch_size=least([each.batch_size for each in sizes]),
        micro_batch_size=least([each.micro_batch_size for each in sizes]),
        prefill_chunk=least([each.prefill_chunk for each in sizes]),
    )

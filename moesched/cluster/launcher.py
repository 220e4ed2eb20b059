"""The launcher of a cluster: sends orders to the nodes, collects their results, and recovers from lost nodes.

An order asks nodes to generate tokens for prompts. An epoch is a period in which the same nodes (its members) carry out
orders together. The loss of a node ends the epoch. If the remaining nodes hold all experts, they continue from the
tokens so far in a new epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from moesched.cluster.messages import (
    AllLoaded,
    Begin,
    Done,
    Failed,
    Loaded,
    Loading,
    Member,
    Order,
    Piece,
    Prepared,
    Stop,
    Tokens,
)
from moesched.cluster.roster import Back, Lost, Node, OfOrder, Roster
from moesched.cluster.slowness import SlowNodes
from moesched.cluster.token_log import Remainder, TokenLog
from moesched.errors import BadInput, MoeschedError, NodeLost, TransportError
from moesched.inputs.defaults import JOIN_SECONDS
from moesched.inputs.options import SizeOptions
from moesched.options import part_of
from moesched.system.logs import Log

_log = Log(__name__)

GLANCE_SECONDS = 0.02
"""Seconds between checks of the nodes' processes."""
PARTING_SECONDS = 60.0
"""Seconds that responsive nodes have to end their tasks and send results when an epoch ends early."""
NOTICE_SECONDS = 5.0
"""Seconds that the launcher waits to notice the loss of a node itself, after another node has reported the loss."""


class Finished(msgspec.Struct):
    """A report or a recording that a node sent for one order (a request to generate tokens for prompts).

    Attributes:
        what: "report" or "recording".
        data: the report or recording, as MessagePack.
    """

    rank: int
    order: int
    what: str
    data: bytes


class Launch:
    """One run on a cluster.

    Args:
        roster: the nodes.
        log: the prompts; tokens are added as they arrive.
        sizes: the requested batch sizes.
        on_loading: called with the number of loaded resident pages, and of all resident pages, summed over the nodes.
        on_tokens: called with new tokens, by request.

    Attributes:
        log: the prompts, and the tokens so far.
        finished: reports and recordings of the nodes, in the order of arrival.
        epoch: number of the current epoch, from 0.
        failure: the reason why the run ended early; None otherwise.
    """

    def __init__(
        self,
        roster: Roster,
        log: TokenLog,
        sizes: SizeOptions,
        on_loading: Callable[[int, int], object] = lambda done, total: None,
        on_tokens: Callable[[dict[int, list[int]]], object] = lambda fresh: None,
    ) -> None:
        self.finished: list[Finished] = []
        self.epoch = 0
        self.failure: str | None = None
        self._roster = roster
        self.log = log
        self._sizes = sizes
        self._on_loading, self._on_tokens = on_loading, on_tokens
        self._order = -1
        self._begun = False
        self._counted = 0
        """Number of `Tokens` messages of the current order that have been added to `log`."""
        self._held: dict[int, frozenset[int]] = {}
        """Experts that each node holds in the latest placement, by rank."""
        self._gone: Node | None = None
        """The most recently lost node."""
        self._slow = SlowNodes([])

    def run(self) -> None:
        """Run until all tokens are generated.

        Raises:
            BadInput: a node refuses, or is refused.
            NodeLost: a node is lost, and the others cannot go on without it.
            MoeschedError: a node failed and gave the reason, or nodes generated different tokens.
            KeyboardInterrupt: Ctrl-C; it is raised after the nodes have sent their results so far.
        """
        self._wait_for(lambda: all(node.peer for node in self._roster.nodes), JOIN_SECONDS, "join")
        self._roster.members = list(self._roster.nodes)
        try:
            while self.failure is None and (remainder := self.log.remainder()) is not None:
                self._carry_out(remainder)
        except KeyboardInterrupt:
            waiting_for = ", ".join(str(node.host) for node in self._roster.members if not node.done)
            _log.warning("stopping; the next signal stops at once", waiting_for=waiting_for)
            self._stop("the run was interrupted")
            raise
        except BadInput as error:
            if self._gone is None:
                raise
            raise NodeLost(
                f"{self._gone.host} is lost: {self._gone.lost}; the others cannot take over: {error}",
                self._gone.host.rank,
            ) from error

    # -- orders ------------------------------------------------------------------------------------

    def _carry_out(self, remainder: Remainder) -> None:
        """Have the members run the requests of `remainder`; return early if a node is lost, comes back or fails."""
        self._order += 1
        try:
            self._prepare(remainder)
            self._wait_for(
                lambda: self.failure is not None or all(node.done for node in self._roster.members)
            )
        except Lost as error:
            self._go_on_without(error.node)
        except Back:
            self._stop("a node is back")
            self._renew([node for node in self._roster.nodes if node.peer is not None])
        else:
            if self.failure is not None:
                self._stop(self.failure)
                return
            self._compare([node.done for node in self._roster.members if node.done is not None])

    def _prepare(self, remainder: Remainder) -> None:
        members = self._roster.members
        self._begun, self._counted = False, 0
        order = Order(
            epoch=self.epoch,
            order=self._order,
            members=[node.host.rank for node in members],
            first_request=remainder.first_request,
            prompts=remainder.prompts,
            new_tokens=remainder.new_tokens,
            sizes=self._sizes,
        )
        for node in members:
            node.prepared = node.done = None
            node.loading, node.loaded = (0, 0), False
            self._roster.say(node, order)
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
            self._roster.say(node, begin)

    def _go_on_without(self, gone: Node) -> None:
        """Start a new epoch without a lost node; raise NodeLost if the other nodes do not hold all experts."""
        _log.warning("a node is lost", node=str(gone.host), why=gone.lost)
        self._gone = gone
        left = self._roster.members = [node for node in self._roster.members if node is not gone]
        self._stop(f"{gone.host} is lost")
        if self.log.remainder() is None:
            return  # all tokens were generated before the loss
        everywhere = frozenset().union(*self._held.values())
        here = frozenset().union(*(self._held.get(node.host.rank, ()) for node in left))
        if not left or here < everywhere:
            why = "the others do not hold its experts" if left else "no node is left"
            raise NodeLost(
                f"{gone.host} is lost: {gone.lost}; {why}; {self.log.count} tokens were generated",
                gone.host.rank,
            )
        self._renew(left)

    def _renew(self, members: list[Node]) -> None:
        self.epoch += 1
        self._roster.members = members
        _log.warning("going on", nodes=[node.host.rank for node in members], epoch=self.epoch)

    def _stop(self, reason: str) -> None:
        """Tell the members that the epoch ends for this reason; wait up to `PARTING_SECONDS` for their results."""
        asked = [node for node in self._roster.members if node.peer is not None and node.done is None]
        begun, self._begun = self._begun, False
        for node in asked:
            self._roster.say(node, Stop(epoch=self.epoch, reason=reason))
        deadline = time.monotonic() + PARTING_SECONDS
        while (
            begun and time.monotonic() < deadline and any(not node.done and not node.lost for node in asked)
        ):
            with suppress(
                Lost, Back, MoeschedError
            ):  # the caller handles one failure at a time; lasting ones are raised again
                self._look(GLANCE_SECONDS)

    def _compare(self, ends: Sequence[Done]) -> None:
        if len({end.digest for end in ends}) > 1:
            said = "; ".join(
                f"node {node.host.rank}: {node.done and node.done.digest}" for node in self._roster.members
            )
            raise TransportError(
                f"the nodes generated different tokens: {said}: give all of them the same build"
            )

    def _note_placement(self, plans: Sequence[Prepared]) -> None:
        placement = plans[0].placement
        ranks = [node.host.rank for node in self._roster.members]
        if placement:
            self._held = {rank: frozenset(held) for rank, held in zip(ranks, placement, strict=True)}
        for node, plan in zip(self._roster.members, plans, strict=True):
            if plan.placement != placement:
                raise BadInput(
                    f"{node.host} would place the experts differently from {self._roster.members[0].host}: give them "
                    "the same memory in the cluster file"
                )

    # -- what comes in -----------------------------------------------------------------------------

    def _wait_for(self, condition: Callable[[], bool], seconds: float = float("inf"), what: str = "") -> None:
        """Process messages of nodes, and losses of nodes, until `condition` returns True.

        Args:
            what: what the nodes are to do, as a verb for the error message, such as "join".

        Raises:
            BadInput: the condition does not hold after `seconds`.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            self._look(GLANCE_SECONDS)
            if time.monotonic() > deadline:
                missing = ", ".join(str(node.host) for node in self._roster.nodes if node.peer is None)
                raise BadInput(
                    f"{missing} did not {what} in {seconds:g} s: start it, or check that it can be reached"
                )

    def _look(self, seconds: float) -> None:
        """Process messages for up to `seconds`, then check for lost nodes."""
        for node, message in self._roster.hear(seconds):
            if message.epoch == self.epoch:
                self._take_in(node, message)
        self._roster.look_after()

    def _take_in(self, node: Node, message: OfOrder) -> None:
        """Record what a member reports about the current order: its progress, tokens, results, end or failure."""
        match message:
            case Prepared():
                node.prepared, node.ready = message, True
            case Loading():
                node.loading = (message.done, message.total)
                self._on_loading(
                    *map(sum, zip(*(each.loading for each in self._roster.members), strict=True))
                )
            case Loaded():
                node.loaded = True
                if all(each.loaded for each in self._roster.members):
                    # Exchanges begin only now, so that no node waits in one for a node with a slower disk.
                    for each in self._roster.members:
                        self._roster.say(each, AllLoaded(epoch=self.epoch, order=self._order))
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
        # The nodes generate the same tokens, so each message counts once, from the node that sends it first. If that
        # node is lost, messages of the others continue where its last one ended.
        if (message.order, message.place) == (self._order, self._counted):
            self._counted += 1
            fresh = self.log.add(message.tokens, message.ended)
            if fresh:
                self._on_tokens(fresh)
        slow = self._slow.computed(node.host.rank, message.seconds - message.waited)
        for rank, factor in slow.items():
            _log.warning(
                "a node is slow: the others wait for it",
                node=str(self._roster.nodes[rank].host),
                factor=round(factor, 1),
            )

    def _take_piece(self, node: Node, piece: Piece) -> None:
        parts = node.pieces.setdefault((piece.order, piece.what), [])
        parts.append(piece.data)
        if piece.last:
            del node.pieces[piece.order, piece.what]
            self.finished.append(Finished(node.host.rank, piece.order, piece.what, b"".join(parts)))

    def _failed(self, node: Node, message: Failed) -> None:
        """Raise a failed member's error; do nothing if the member failed because the launcher ended the epoch.

        A member that could not reach another node may notice the loss before the launcher does. So its error is
        raised after `NOTICE_SECONDS`, unless the launcher itself detects the loss by then, and raises `Lost` instead.
        """
        said = f"{node.host}: {message.message}"
        if message.kind == "input":
            raise BadInput(said)
        if message.kind == "stopped":
            return
        deadline = time.monotonic() + NOTICE_SECONDS
        while message.kind == "lost" and time.monotonic() < deadline:
            self._look(GLANCE_SECONDS)
        if message.gone:
            raise NodeLost(said, message.gone[0])
        raise MoeschedError(said)


def smallest(sizes: Sequence[SizeOptions]) -> SizeOptions:
    """Return batch sizes that fit every node: of each size the smallest that a node sent; None if no node sent it."""

    def least(values: Sequence[int | None]) -> int | None:
        return min((each for each in values if each is not None), default=None)

    each_size = [part_of(each, SizeOptions) for each in sizes]
    return SizeOptions(**{name: least([each[name] for each in each_size]) for name in each_size[0]})

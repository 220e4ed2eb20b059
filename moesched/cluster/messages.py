"""Messages between the launcher and the nodes: typed, packed by msgspec, of limited length, never pickled."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from moesched.cluster.node_jobs import NodeRun
from moesched.errors import BadInput, MoeschedError
from moesched.inputs.options import SizeOptions
from moesched.system.decoding import DECODE_ERRORS, reason

PROTOCOL = 5
"""Version of these messages; nodes with another one are refused. `Join` and `Refused` are the same in all versions."""

FailureKind = Literal["input", "lost", "stopped", "other"]

MOST_BYTES = 64 * 1024 * 1024
"""Limit of one message; longer ones are dropped unread."""

PIECE_BYTES = 256 * 1024
"""Size of the pieces in which reports and recordings are sent, so that no message is long."""


Says = TypeVar("Says", bound="Message")


class Unreadable(MoeschedError):
    """The bytes are not a valid message."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One message."""


class Numbered(Message, frozen=True, kw_only=True):
    """A message of an admitted node, or to one.

    Attributes:
        serial: its number on the connection, from 1; a message that does not count upwards was sent before.
    """

    serial: int = 0


class AboutOrder(Numbered, frozen=True, kw_only=True):
    """A message about an order of an epoch."""

    epoch: int
    order: int


class Serials:
    """Numbers the messages of one direction of a connection, and knows those that were received before."""

    def __init__(self) -> None:
        self._last = 0

    def number(self, message: Says) -> Says:
        """The message with the next number, if its kind has one."""
        if not isinstance(message, Numbered):
            return message
        self._last += 1
        return msgspec.structs.replace(message, serial=self._last)

    def is_new(self, message: Message) -> bool:
        """Test whether a received message is not a replay of an earlier one."""
        if not isinstance(message, Numbered):
            return True
        before, self._last = self._last, max(self._last, message.serial)
        return message.serial > before


# ---------------------------------------------------------------- from a node


class JoinRequest(Message, frozen=True, kw_only=True, tag="Join", forbid_unknown_fields=False):
    """A node asks to join. One of another version is understood too, unknown fields or not, and refused with a reason.

    Attributes:
        protocol: the version of these messages; `version` is that of moesched.
        model: the fingerprint of its folder (see `fingerprint.py`).
        epoch: the last epoch that it took part in; -1 for none.
        process: its process id.
        build: its processor, system and libraries (see `build.py`).
    """

    protocol: int
    version: str
    rank: int
    model: str
    process: int
    epoch: int = -1
    build: dict[str, str] = {}


class Pong(Numbered, frozen=True, kw_only=True):
    """The answer to a Ping.

    Attributes:
        number: that of the Ping.
        clock: the time on the node's clock, in nanoseconds.
    """

    number: int
    clock: int


class Prepared(AboutOrder, frozen=True, kw_only=True):
    """A node has opened its device and planned.

    Attributes:
        port: the port that its transport will listen on.
        sizes: the largest batch sizes that fit it.
        placement: the experts of each node, from its policy.
    """

    port: int
    sizes: SizeOptions
    placement: list[list[int]]


class Loading(Numbered, frozen=True, kw_only=True):
    """The number of resident pages that are loaded, and of all."""

    epoch: int
    done: int
    total: int


class Loaded(AboutOrder, frozen=True, kw_only=True):
    """The weights that stay are loaded, and the node is about to make its first exchange."""


class Tokens(AboutOrder, frozen=True, kw_only=True):
    """New tokens of some requests.

    Attributes:
        place: number of such messages that the node sent before for the same order; those of all nodes are alike.
        tokens: by request.
        ended: requests that end with these tokens, even without a stop token.
        seconds: time since the previous tokens.
        waited: the part of it spent in exchanges.
    """

    place: int
    tokens: dict[int, list[int]]
    ended: list[int] = []
    seconds: float = 0.0
    waited: float = 0.0


class Piece(AboutOrder, frozen=True, kw_only=True):
    """A piece of a report or a recording.

    Attributes:
        what: "report" or "recording".
        last: whether this piece completes it.
    """

    what: str
    data: bytes
    last: bool


class Done(AboutOrder, frozen=True, kw_only=True):
    """An order is carried out.

    Attributes:
        digest: a hash of all its tokens; the same on all nodes.
        failure: the reason that it ended early; empty where it did not.
    """

    digest: str
    failure: str = ""


class Failed(AboutOrder, frozen=True, kw_only=True):
    """An order cannot be carried out.

    Attributes:
        kind: "input" for invalid input, "lost" where other nodes did not take part, "stopped" where the launcher ended
            the epoch.
        message: one line.
        gone: the ranks that the node cannot reach any more.
    """

    gone: list[int] = []
    kind: FailureKind
    message: str


# ---------------------------------------------------------------- from the launcher


class Welcome(Numbered, frozen=True, kw_only=True):
    """The answer to an accepted JoinRequest.

    Attributes:
        run: the options that all orders share.
        lost_after: seconds of silence after which the other side counts as lost.
        transport: the name of the transport between the nodes.
    """

    run: NodeRun
    lost_after: float
    transport: str


class Refused(Message, frozen=True, kw_only=True):
    """The launcher refuses a node, which then ends."""

    reason: str


class Ping(Numbered, frozen=True, kw_only=True):
    """Sent periodically: shows that the launcher runs, and asks for the time on the node's clock."""

    number: int


class Order(AboutOrder, frozen=True, kw_only=True):
    """Prompts to generate tokens for.

    Attributes:
        members: the ranks that take part, ascending; a node's place among them is its number in the plan.
        first_request: the number of the first prompt's request in the run.
        prompts: token ids, including those generated so far.
    """

    members: list[int]
    first_request: int
    prompts: list[list[int]]
    new_tokens: int
    sizes: SizeOptions


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """The address and public key of a node's transport."""

    rank: int
    address: str
    port: int
    key: str


class Begin(AboutOrder, frozen=True, kw_only=True):
    """All members are ready: carry the order out, with these sizes."""

    members: list[Member]
    sizes: SizeOptions


class AllLoaded(AboutOrder, frozen=True, kw_only=True):
    """All members are about to make their first exchange: make it."""


class Stop(Numbered, frozen=True, kw_only=True):
    """End an epoch: abandon the current step, keep the weights, and wait for an order of a later epoch."""

    epoch: int
    reason: str


class Quit(Numbered, frozen=True, kw_only=True):
    """The run is over.

    Attributes:
        interrupted: whether it ended early.
    """

    interrupted: bool = False


NodeSays = JoinRequest | Pong | Prepared | Loading | Loaded | Tokens | Piece | Done | Failed
LauncherSays = Welcome | Refused | Ping | Order | Begin | AllLoaded | Stop | Quit

_of_nodes: msgspec.msgpack.Decoder[NodeSays] = msgspec.msgpack.Decoder(NodeSays)
_of_launchers: msgspec.msgpack.Decoder[LauncherSays] = msgspec.msgpack.Decoder(LauncherSays)


def pack(message: NodeSays | LauncherSays) -> bytes:
    """A message as bytes."""
    return msgspec.msgpack.encode(message)


def read_node(data: bytes) -> NodeSays:
    """Decode a node's message.

    Raises:
        Unreadable: the bytes are not such a message.
    """
    try:
        return _of_nodes.decode(data)
    except (*DECODE_ERRORS, BadInput) as error:
        raise Unreadable(f"{len(data)} bytes are not a message of a node: {reason(error)}") from None


def read_launcher(data: bytes) -> LauncherSays:
    """Decode a message of the launcher.

    Raises:
        Unreadable: the bytes are not such a message.
    """
    try:
        return _of_launchers.decode(data)
    except (*DECODE_ERRORS, BadInput) as error:
        raise Unreadable(f"{len(data)} bytes are not a message of a launcher: {reason(error)}") from None

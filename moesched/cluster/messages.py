"""Messages between the launcher and the nodes: typed, packed by msgspec, of limited length, never pickled."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from moesched.cluster.node_jobs import NodeRun
from moesched.errors import BadInput, MoeschedError
from moesched.inputs.options import SizeOptions
from moesched.system.decoding import DECODE_ERRORS, reason

PROTOCOL = 5
"""Version of these messages; nodes of another version are refused. All versions share `JoinRequest` and `Refused`."""

FailureKind = Literal["input", "lost", "stopped", "other"]

MOST_BYTES = 64 * 1024 * 1024
"""Largest number of bytes of one message as it is sent, encrypted; longer ones are dropped unread."""
LONGEST = MOST_BYTES - 64
"""Largest number of bytes of one message before it is encrypted."""

PIECE_BYTES = 256 * 1024
"""Bytes of each piece of a report or a recording, so that no message is long."""


Says = TypeVar("Says", bound="Message")


class Unreadable(MoeschedError):
    """Raised if received bytes are not a valid message."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages between the launcher and the nodes."""


class Numbered(Message, frozen=True, kw_only=True):
    """Base of messages from or to an admitted node.

    Attributes:
        serial: number of the message on its connection, from 1; if it does not rise, the message is a replay.
    """

    serial: int = 0


class AboutOrder(Numbered, frozen=True, kw_only=True):
    """Base of messages about an order: a request to nodes to generate tokens for prompts.

    Attributes:
        epoch: number of the order's epoch, a period in which the same nodes carry out orders together.
        order: number of the order.
    """

    epoch: int
    order: int


class Serials:
    """Numbers the messages of one direction of a connection, and detects replayed ones."""

    def __init__(self) -> None:
        self._last = 0

    def number(self, message: Says) -> Says:
        """Return a copy of a message with the next serial number; messages that have no number are unchanged."""
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
    """A node's request to join; requests of other protocol versions can be read, too, and are refused with a reason.

    Attributes:
        protocol: version of these messages.
        version: version of moesched.
        rank: the node's rank in the cluster file.
        model: hash of the model's configuration, tensors and files on the node's machine, from `handshake.fingerprint`.
        epoch: the last epoch that the node took part in; -1 for none.
        process: the node's process id.
        build: the node's processor, system and libraries, by key.
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
        number: number of the Ping.
        clock: the time on the node's clock, in nanoseconds.
    """

    number: int
    clock: int


class Prepared(AboutOrder, frozen=True, kw_only=True):
    """A node's report that it has opened its device and planned the `Order`.

    Attributes:
        port: the port that the node's transport will listen on.
        sizes: the largest batch sizes that fit into the node's memory.
        placement: for each of the order's members, the numbers of the experts that it holds in every layer, as this
            node's policy places them; equal on all nodes.
    """

    port: int
    sizes: SizeOptions
    placement: list[list[int]]


class Loading(Numbered, frozen=True, kw_only=True):
    """A node's report on loading: the number of resident pages loaded so far, and of all resident pages."""

    epoch: int
    done: int
    total: int


class Loaded(AboutOrder, frozen=True, kw_only=True):
    """A node's report that its resident weights are loaded, so that it can exchange data with other nodes."""


class Tokens(AboutOrder, frozen=True, kw_only=True):
    """New tokens of some requests, sent by a node; all nodes send equal tokens.

    Attributes:
        place: index of this message among the `Tokens` messages that the node sends for the order.
        tokens: new tokens by request.
        ended: requests of a beam search, which end with these tokens even if the last one is no stop token.
        seconds: time since the previous tokens.
        waited: the part of `seconds` spent in exchanges.
    """

    place: int
    tokens: dict[int, list[int]]
    ended: list[int] = []
    seconds: float = 0.0
    waited: float = 0.0


class Piece(AboutOrder, frozen=True, kw_only=True):
    """A piece of a report or a recording, sent by a node.

    Attributes:
        what: "report" or "recording".
        last: whether this is the last piece.
    """

    what: str
    data: bytes
    last: bool


class Done(AboutOrder, frozen=True, kw_only=True):
    """A node's report that it has ended an `Order`.

    Attributes:
        digest: hash of all tokens of the order; equal on all nodes.
        failure: the reason why the order ended early; empty if it did not.
    """

    digest: str
    failure: str = ""


class Failed(AboutOrder, frozen=True, kw_only=True):
    """A node's report that it cannot carry out an `Order`.

    Attributes:
        kind: "input" for invalid input, "lost" if other nodes did not take part, "stopped" if the launcher ended the
            epoch; else "other".
        message: the reason, in one line.
        gone: the ranks that the node cannot reach any more.
    """

    gone: list[int] = []
    kind: FailureKind
    message: str


# ---------------------------------------------------------------- from the launcher


class Welcome(Numbered, frozen=True, kw_only=True):
    """The answer to an accepted JoinRequest.

    Attributes:
        run: the options that all orders of the run share.
        lost_after: seconds of silence after which the other side counts as lost.
        transport: the name of the transport between the nodes.
    """

    run: NodeRun
    lost_after: float
    transport: str


class Refused(Message, frozen=True, kw_only=True):
    """The launcher's refusal of a node, with the reason; the node then ends."""

    reason: str


class Ping(Numbered, frozen=True, kw_only=True):
    """A message sent periodically: shows that the launcher runs, and asks for the time on the node's clock."""

    number: int


class Order(AboutOrder, frozen=True, kw_only=True):
    """The launcher's request to generate tokens for prompts.

    Attributes:
        members: ranks of the nodes that take part, ascending; plans number the nodes from 0 in this order.
        first_request: index of the first prompt in the run's prompts.
        prompts: token ids of each prompt, including tokens generated so far.
        new_tokens: the largest number of tokens to generate for each prompt.
        sizes: the batch sizes that the user fixed.
    """

    members: list[int]
    first_request: int
    prompts: list[list[int]]
    new_tokens: int
    sizes: SizeOptions


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A node that takes part in an epoch: its rank, and the address, port and public key of its transport."""

    rank: int
    address: str
    port: int
    key: str


class Begin(AboutOrder, frozen=True, kw_only=True):
    """The launcher's message that all members are prepared; they then carry out the `Order` with these batch sizes."""

    members: list[Member]
    sizes: SizeOptions


class AllLoaded(AboutOrder, frozen=True, kw_only=True):
    """The launcher's message that all members have loaded their weights, so that they may exchange data."""


class Stop(Numbered, frozen=True, kw_only=True):
    """The launcher's message that an epoch ends.

    A node then abandons the current step, keeps its weights, and waits for an `Order` of a later epoch.
    """

    epoch: int
    reason: str


class Quit(Numbered, frozen=True, kw_only=True):
    """The launcher's message that the run is over; the node then ends."""


NodeSays = JoinRequest | Pong | Prepared | Loading | Loaded | Tokens | Piece | Done | Failed
LauncherSays = Welcome | Refused | Ping | Order | Begin | AllLoaded | Stop | Quit

_of_nodes: msgspec.msgpack.Decoder[NodeSays] = msgspec.msgpack.Decoder(NodeSays)
_of_launchers: msgspec.msgpack.Decoder[LauncherSays] = msgspec.msgpack.Decoder(LauncherSays)


def pack(message: NodeSays | LauncherSays) -> bytes:
    """Encode a message as bytes."""
    return msgspec.msgpack.encode(message)


def read_node(data: bytes) -> NodeSays:
    """Decode a node's message.

    Raises:
        Unreadable: the bytes are no valid message of a node.
    """
    try:
        return _of_nodes.decode(data)
    except (*DECODE_ERRORS, BadInput) as error:
        raise Unreadable(f"{len(data)} bytes are not a message of a node: {reason(error)}") from None


def read_launcher(data: bytes) -> LauncherSays:
    """Decode a message of the launcher.

    Raises:
        Unreadable: the bytes are no valid message of the launcher.
    """
    try:
        return _of_launchers.decode(data)
    except (*DECODE_ERRORS, BadInput) as error:
        raise Unreadable(f"{len(data)} bytes are not a message of a launcher: {reason(error)}") from None

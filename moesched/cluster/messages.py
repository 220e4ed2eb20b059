"""What the launcher and the nodes say to each other: typed, packed by msgspec, of limited length, never pickled."""

from __future__ import annotations

from typing import Literal

import msgspec

from moesched.cluster.node_jobs import NodeRun
from moesched.errors import BadInput, MoeschedError
from moesched.inputs.options import SizeOptions

PROTOCOL = 1
"""Of this file; nodes that speak another one are refused."""

FailureKind = Literal["input", "lost", "stopped", "other"]

MOST_BYTES = 64 * 1024 * 1024
"""Of one message; what is longer is dropped before it is read."""

PIECE_BYTES = 256 * 1024
"""Reports and recordings travel in pieces, so that no message is long."""


class Unreadable(MoeschedError):
    """Bytes that are no message."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One message."""


# ---------------------------------------------------------------- from a node


class JoinRequest(Message, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """A node asks to take part. One of a later version may say more, and is still understood, so as to be refused.

    Attributes:
        protocol: the version of these messages; `version` is that of moesched.
        model: the fingerprint of its folder (see `fingerprint.py`).
        epoch: the last one that it took part in, -1 for none: one that comes back says so.
        process: its number on its host.
    """

    protocol: int
    version: str
    rank: int
    model: str
    process: int
    epoch: int = -1


class Pong(Message, frozen=True, kw_only=True):
    """The answer to a Ping: what the node's clock said, in nanoseconds."""

    number: int
    clock: int


class Prepared(Message, frozen=True, kw_only=True):
    """A node has opened its device and planned.

    Attributes:
        port: where its transport will listen.
        sizes: the largest that fit it.
        placement: the experts of each node, as its policy placed them.
    """

    epoch: int
    order: int
    port: int
    sizes: SizeOptions
    placement: list[list[int]]


class Loading(Message, frozen=True, kw_only=True):
    """How many of the pages that stay are there."""

    epoch: int
    done: int
    total: int


class Tokens(Message, frozen=True, kw_only=True):
    """New tokens by request, and how long the node computed for them and waited for others.

    Attributes:
        ended: requests that these are the last tokens of, whatever they are.
    """

    epoch: int
    tokens: dict[int, list[int]]
    ended: list[int] = []
    seconds: float = 0.0
    waited: float = 0.0


class Piece(Message, frozen=True, kw_only=True):
    """A part of something long; the last one completes it."""

    epoch: int
    order: int
    what: str
    data: bytes
    last: bool


class Done(Message, frozen=True, kw_only=True):
    """An order is carried out.

    Attributes:
        digest: of all its tokens, the same on all nodes.
        failure: why it ended early, with the tokens so far; empty where nothing was wrong.
    """

    epoch: int
    order: int
    digest: str
    failure: str = ""


class Failed(Message, frozen=True, kw_only=True):
    """An order cannot be carried out.

    Attributes:
        kind: "input" where what was given cannot be used, "lost" where other nodes did not take part, "stopped" where
            the launcher wanted it so.
        message: one line.
        gone: the ranks that it does not reach any more.
    """

    epoch: int
    order: int
    gone: list[int] = []
    kind: FailureKind
    message: str


# ---------------------------------------------------------------- from the launcher


class Welcome(Message, frozen=True, kw_only=True):
    """The answer to a Join that was accepted.

    Attributes:
        run: what all orders have in common.
        lost_after: seconds of silence after which the other side counts as lost.
        transport: the name of what carries the nodes' exchanges.
    """

    run: NodeRun
    lost_after: float
    transport: str


class Refused(Message, frozen=True, kw_only=True):
    """A Join, or a node's keys, memory or plan, cannot be accepted: the node ends."""

    reason: str


class Ping(Message, frozen=True, kw_only=True):
    """Sent all the time: the launcher is there, and wants to know what the node's clock says."""

    number: int


class Order(Message, frozen=True, kw_only=True):
    """Prompts to go on from, in a new epoch or in the same one.

    Attributes:
        members: the ranks that take part, ascending; a node's place among them is its number in the plan.
        first_request: the number of the first prompt's request in the run.
        prompts: token ids, those generated so far included.
    """

    epoch: int
    order: int
    members: list[int]
    first_request: int
    prompts: list[list[int]]
    new_tokens: int
    sizes: SizeOptions


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """Where a node's transport is reached, and by which key it is known."""

    rank: int
    address: str
    port: int
    key: str


class Begin(Message, frozen=True, kw_only=True):
    """All members are ready: carry the order out, with these sizes."""

    epoch: int
    order: int
    members: list[Member]
    sizes: SizeOptions


class Stop(Message, frozen=True, kw_only=True):
    """Let go of an epoch: leave the step in flight, keep the weights, wait for an order of a later one."""

    epoch: int
    reason: str


class Quit(Message, frozen=True, kw_only=True):
    """The run is over; with `interrupted` before its end."""

    interrupted: bool = False


NodeSays = JoinRequest | Pong | Prepared | Loading | Tokens | Piece | Done | Failed
LauncherSays = Welcome | Refused | Ping | Order | Begin | Stop | Quit

_of_nodes: msgspec.msgpack.Decoder[NodeSays] = msgspec.msgpack.Decoder(NodeSays)
_of_launchers: msgspec.msgpack.Decoder[LauncherSays] = msgspec.msgpack.Decoder(LauncherSays)


def pack(message: NodeSays | LauncherSays) -> bytes:
    """A message as bytes."""
    return msgspec.msgpack.encode(message)


def read_node(data: bytes) -> NodeSays:
    """What a node says.

    Raises:
        Unreadable: the bytes are no such message.
    """
    try:
        return _of_nodes.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, BadInput) as error:
        raise Unreadable(f"{len(data)} bytes are no message of a node: {error}") from None


def read_launcher(data: bytes) -> LauncherSays:
    """What the launcher says.

    Raises:
        Unreadable: the bytes are no such message.
    """
    try:
        return _of_launchers.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, BadInput) as error:
        raise Unreadable(f"{len(data)} bytes are no message of a launcher: {error}") from None

"""Notices between serving nodes: before each step the first node sends the others the step's rows.

Rows are requests and their new tokens. Only the first node knows which requests came, left or wait. The others need
nothing but rows, so they cannot disagree with the first node.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np

from moesched.errors import TransportError
from moesched.machines.networks import NETWORK
from moesched.requests.rows import Rows
from moesched.seams import Exchange, Transport
from moesched.steps.run_state import RunState
from moesched.system.decoding import DECODE_ERRORS, reason
from moesched.tasks import Collective
from moesched.work import Work

FIRST = 0
"""Number of the node that knows the requests."""
NOTICE = "notice"
"""The verb of a notice's task."""

Notice = dict[int, Rows] | None
"""The rows of the next step, by micro-batch; empty while the first node waits for requests, None at the end."""

_decoder: msgspec.msgpack.Decoder[Notice] = msgspec.msgpack.Decoder(Notice)


class Notices:
    """Sends a notice (the rows of the next step) before each step if this is the first node, else receives it.

    A notice is a collective on the network's lane, behind the exchanges of the step before, and travels while that
    step's last kernels run. On a virtual clock it takes the network's latency.

    Args:
        run_state: the node's engine and lanes.
        peers: on a virtual clock, the `Notices` of the other nodes if this is the first; else empty.
    """

    def __init__(self, run_state: RunState, peers: Sequence[Notices] = ()) -> None:
        self._engine = run_state.engine
        self._lane = run_state.lanes[NETWORK]
        self._work = Work(NOTICE, NETWORK)
        self._node = run_state.plan.nodes.index
        self._peers = peers
        self._came: deque[Notice] = deque()

    def give(self, notice: Notice, step: int) -> None:
        """Send `notice` before the step `step` to the other nodes; does not wait until they have it."""
        for each in self._peers:
            each._came.append(notice)
        self._submit(notice, step)

    async def take(self, step: int) -> Notice:
        """Wait for the notice (the rows of step `step`) that the first node sends, and return it."""
        await self._submit(None, step)
        return self._came.popleft()

    def carry(self, transport: Transport, task: Collective) -> None:
        """Run a task of the network's lane: the first node broadcasts its notice, the others receive and keep it.

        Raises:
            TransportError: the broadcast failed, or the bytes that came are no notice.
        """
        exchange = Exchange(task.ticket, task.signature, task.step)
        if self._node == FIRST:
            packed = np.frombuffer(pack_notice(task.operands), np.uint8)
            transport.broadcast(FIRST, exchange, packed, FIRST)
        else:
            self._came.append(read_notice(transport.broadcast(self._node, exchange, None, FIRST).tobytes()))

    def _submit(self, notice: Notice, step: int) -> Collective:
        task = Collective(self._lane, self._work, NOTICE, operands=notice, step=step)
        task.signature = f"rows of step {step}"
        return self._engine.collective(task, (), ())


def pack_notice(notice: Notice) -> bytes:
    """Encode a notice as bytes."""
    return msgspec.msgpack.encode(notice)


def read_notice(data: bytes) -> Notice:
    """Decode a notice.

    Raises:
        TransportError: the bytes are no notice.
    """
    try:
        return _decoder.decode(data)
    except DECODE_ERRORS as error:
        raise TransportError(f"{len(data)} bytes are not the rows of a step: {reason(error)}") from None

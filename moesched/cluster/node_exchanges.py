"""A node's transport during an epoch, which the control link's thread may stop at any time.

An epoch is a period in which the same nodes (its members) run a model together. They carry out orders: requests to
generate tokens, sent by the launcher, the process that starts the nodes and directs them.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from moesched.cluster.cluster_file import Host
from moesched.cluster.endpoints import endpoint, listening_at, reserved_port
from moesched.cluster.messages import Begin
from moesched.cluster.metered import Metered
from moesched.cluster.node_transports import meet
from moesched.system.own_loop import run_on_own_loop

LET_GO = "the launcher ended this epoch"


class NodeExchanges:
    """Opens a transport to the other members for each order, and stops the transport if the launcher ends the epoch.

    Args:
        secret: the node's secret key.
    """

    def __init__(self, host: Host, secret: str) -> None:
        self._host = host
        self._secret = secret
        self._lock = threading.Lock()
        self._transport: Metered | None = None
        self._stopped = self._epoch = -1
        self._reserved: socket.socket | None = None

    def reserve(self) -> int:
        """Return the port that the next transport will listen on; reserve a free one if the cluster file fixes none."""
        if self._host.port:
            return self._host.port
        self._release()
        self._reserved = reserved_port(listening_at(self._host.address))
        port: int = self._reserved.getsockname()[1]
        return port

    def open(
        self,
        transport: str,
        begin: Begin,
        node: int,
        *,
        port: int,
        lost_after: float,
        on_loaded: Callable[[], object],
    ) -> Metered:
        """Open a transport to the members of an epoch.

        Args:
            transport: name of the transport.
            begin: the launcher's message with the members and the epoch.
            node: this node's index among the members.
            port: the port to listen on.
            lost_after: seconds of silence after which a member counts as lost.
            on_loaded: called just before the first exchange, when this node has its weights; the exchange then waits
                until the method `NodeExchanges.begin` is called.

        Raises:
            BadInput: the transport cannot be opened here.
        """
        self._release()
        opened = Metered(
            meet(
                transport,
                begin,
                node,
                secret=self._secret,
                listen=endpoint(listening_at(self._host.address), port),
                lost_after=lost_after,
            ),
            on_loaded,
        )
        with self._lock:
            self._transport, self._epoch = opened, begin.epoch
            if self.is_stopped(begin.epoch):
                opened.stop(LET_GO)
        return opened

    def shut(self) -> None:
        """Close the current transport, and free its port."""
        with self._lock:
            transport, self._transport = self._transport, None
        if transport is not None:
            run_on_own_loop(transport.aclose)

    def is_stopped(self, epoch: int) -> bool:
        """Test whether the launcher has ended an epoch."""
        return epoch <= self._stopped

    def begin(self, epoch: int) -> None:
        """Allow the first exchange of an epoch. Callable from any thread; returns at once."""
        with self._lock:
            if self._transport is not None and self._epoch == epoch:
                self._transport.begin()

    def stop(self, epoch: int, reason: str) -> None:
        """Fail the exchanges of all epochs up to this one, for this reason. Any thread may call; returns at once."""
        with self._lock:
            self._stopped = max(self._stopped, epoch)
            if self._transport is not None:
                self._transport.stop(reason)

    def _release(self) -> None:
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None

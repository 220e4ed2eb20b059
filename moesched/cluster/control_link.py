"""A node's end of the control channel: a thread that answers the launcher while the node computes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from moesched.cluster.cluster_file import LauncherAddress
from moesched.cluster.curve.keys import KeyPair
from moesched.cluster.endpoints import endpoint, is_ipv6, place
from moesched.cluster.messages import (
    MOST_BYTES,
    AllLoaded,
    JoinRequest,
    LauncherSays,
    NodeSays,
    Ping,
    Pong,
    Quit,
    Refused,
    Serials,
    Stop,
    Unreadable,
    Welcome,
    pack,
    read_launcher,
)
from moesched.errors import BadInput, MoeschedError
from moesched.system.logs import Log

_log = Log(__name__)

_POLL_MILLISECONDS = 100
LINGER_MILLISECONDS = 5_000
"""Milliseconds allowed for sending the last messages to the launcher."""

MOST_HANG_UPS = 3
"""Broken-off handshakes after which the launcher's key counts as wrong; a launcher that was paused breaks off one."""

_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_FAILURES |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


class LauncherGone(MoeschedError):
    """Raised if the launcher has been silent for too long."""


class ControlLink:
    """A node's connection to the launcher: call `join` first, then `next` to receive and `say` to send.

    An order is the launcher's request to generate tokens for some prompts.

    Args:
        on_epoch: called on the link's thread with `AllLoaded` when all nodes that run an order have loaded their
            weights, and with `Stop` when the launcher tells them to stop.
        on_gone: called on the link's thread when the launcher is silent, ends the run, or goes on without this node.
    """

    def __init__(
        self,
        launcher: LauncherAddress,
        keys: KeyPair,
        *,
        on_epoch: Callable[[AllLoaded | Stop], object],
        on_gone: Callable[[], object],
    ) -> None:
        self._launcher = launcher
        self._on_epoch, self._on_gone = on_epoch, on_gone
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = 0  # with a limit, the thread would block on a launcher that is gone
        self._socket.maxmsgsize = MOST_BYTES
        self._socket.curve_serverkey = launcher.key.encode()
        self._socket.curve_secretkey = keys.secret.encode()
        self._socket.curve_publickey = keys.public.encode()
        self._failures = self._socket.get_monitor_socket(_FAILURES)
        self._inbox: queue.SimpleQueue[LauncherSays | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[NodeSays | None] = queue.SimpleQueue()
        self._bell, self._heard_bell = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._heard_bell.bind("inproc://something to say")
        self._bell.connect("inproc://something to say")
        self._ringing = threading.Lock()
        self._thread = threading.Thread(target=self._work, name="link to the launcher", daemon=True)
        self._lost_after = 0.0
        self._hang_ups = 0
        self._said, self._received = Serials(), Serials()

    def join(self, request: JoinRequest, patience: float) -> Welcome:
        """Ask the launcher to admit this node to the run; start the link's thread once the launcher agrees.

        Args:
            patience: seconds to wait for the launcher's answer.

        Raises:
            BadInput: the launcher refuses and gives its reason, has another key than the cluster file says, does not
                know this node's key, or does not answer.
        """
        self._socket.ipv6 = is_ipv6(self._launcher.address)
        self._socket.connect(endpoint(self._launcher.address, self._launcher.port))
        self._socket.send(pack(request))
        end = time.monotonic() + patience
        while (left := end - time.monotonic()) > 0:
            if self._socket.poll(min(_POLL_MILLISECONDS, int(1000 * left))):
                answer = read_launcher(self._socket.recv())
                if isinstance(answer, Refused):
                    raise BadInput(answer.reason)
                if isinstance(answer, Welcome) and self._received.is_new(answer):
                    self._lost_after = answer.lost_after
                    self._socket.linger = LINGER_MILLISECONDS
                    self._thread.start()
                    return answer
            self._require_handshake()
        raise BadInput(f"no launcher at {self._where} in {patience:g} s: start `moesched launch` there")

    def next(self, seconds: float) -> LauncherSays | None:
        """Return the launcher's next message for the node; None if none arrives within `seconds`.

        Raises:
            LauncherGone: the launcher has been silent for too long. If it ends the run, or goes on without this node,
                this method returns its message `Quit` or `Refused` instead.
        """
        try:
            message = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return None
        if message is None:
            raise LauncherGone(f"the launcher at {self._where} is gone")
        return message

    def say(self, message: NodeSays) -> None:
        """Queue a message to the launcher; any thread may call this."""
        self._outbox.put(message)
        with self._ringing:
            self._bell.send(b"")

    def close(self) -> None:
        """Send the queued messages, end the thread, and disconnect."""
        if self._socket.closed:
            return
        if self._thread.is_alive():
            self._outbox.put(None)
            with self._ringing:
                self._bell.send(b"")
            self._thread.join()
        self._socket.disable_monitor()
        for each in (self._bell, self._heard_bell, self._failures, self._socket):
            each.close()
        self._context.term()

    @property
    def _where(self) -> str:
        return place(self._launcher.address, self._launcher.port)

    def _require_handshake(self) -> None:
        while self._failures.poll(0):
            event = recv_monitor_message(self._failures)["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise BadInput(
                    f"the launcher at {self._where} does not know this node's key: put the text of moesched.key into "
                    "the cluster file"
                )
            self._hang_ups += event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL or self._hang_ups == MOST_HANG_UPS:
                raise BadInput(
                    f"the process at {self._where} does not have the launcher's key from the cluster file: correct "
                    "launcher.key, or the address"
                )

    # -- on the thread -----------------------------------------------------------------------------

    def _work(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._heard_bell, zmq.POLLIN)
        heard = time.monotonic()
        while True:
            ready = dict(poller.poll(_POLL_MILLISECONDS))
            if self._heard_bell in ready:
                self._heard_bell.recv()
                message = self._outbox.get()
                if message is None:
                    return
                self._send(message)
            if self._socket in ready:
                heard = time.monotonic()
                self._take(self._socket.recv())
            elif time.monotonic() - heard > self._lost_after and not self._socket.poll(_POLL_MILLISECONDS):
                # A process that was paused gets the messages of that time a moment later: hence the second look.
                self._inbox.put(None)
                self._on_gone()
                heard = float("inf")

    def _send(self, message: NodeSays) -> None:
        self._socket.send(pack(self._said.number(message)))

    def _take(self, data: bytes) -> None:
        try:
            message = read_launcher(data)
        except Unreadable:
            return  # the sender is authenticated: a launcher of another version, which refuses this node's join
        if not self._received.is_new(message):
            _log.warning("dropped a message that was sent before", peer=self._where)
            return
        if isinstance(message, Ping):
            self._send(Pong(number=message.number, clock=time.perf_counter_ns()))
            return
        if isinstance(message, AllLoaded):
            self._on_epoch(message)
            return
        self._inbox.put(message)
        if isinstance(message, Stop):
            self._on_epoch(message)
        elif isinstance(message, Quit | Refused):
            self._on_gone()

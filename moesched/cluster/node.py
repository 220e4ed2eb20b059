"""A node: joins the launcher, then carries out orders until it is sent home or the launcher is gone."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

import anyio
import msgspec

from moesched.cluster.cluster_file import Cluster, Host, listening_at, load_cluster
from moesched.cluster.curve.keys import SECRET_NAME, KeyPair, default_folder, read_keys
from moesched.cluster.fingerprint import fingerprint
from moesched.cluster.link import ControlLink
from moesched.cluster.members import GRACE_SECONDS, keep_to
from moesched.cluster.messages import (
    PIECE_BYTES,
    PROTOCOL,
    Begin,
    Done,
    Failed,
    FailureKind,
    JoinRequest,
    Loading,
    Order,
    Piece,
    Prepared,
    Quit,
    Refused,
    Stop,
    Tokens,
    Welcome,
)
from moesched.cluster.metered import Metered
from moesched.cluster.node_jobs import Ask, NodeJob
from moesched.cluster.node_transports import meet
from moesched.errors import BadInput, MoeschedError, PolicyError, RankLost, TransportError
from moesched.inputs.options import SizeOptions
from moesched.models.checkpoint import Checkpoint, open_checkpoint

JOIN_SECONDS = 60.0
STAND_BY_SECONDS = 0.25
"""Metal was seen to give up memory that lay idle for more than half a second (RACS'24, Finding 2)."""
REPORT, RECORDING = "report", "recording"
"""What nodes send in pieces."""


def run_node(
    cluster_file: Path, rank: int, model: Path, *, key: Path | None = None, patience: float = JOIN_SECONDS
) -> None:
    """Be one node of a cluster, until the launcher says that the run is over.

    Args:
        key: the file of the secret key; by default what the cluster file says, or where `moesched keygen` puts it.
        patience: seconds to wait for the launcher.

    Raises:
        BadInput: the launcher refuses, or what it asks for cannot be done here; the launcher is told too.
        LauncherGone: the launcher is silent.
    """
    cluster = load_cluster(cluster_file)
    host = cluster.host(rank)
    named = key or (cluster_file.parent / host.secret if host.secret else default_folder() / SECRET_NAME)
    keys = read_keys(named.expanduser())
    if keys.public != host.key:
        raise BadInput(
            f"{named} is not the key of {host} in {cluster_file}: put the text of its moesched.key there, or name "
            "another --key"
        )
    keep_to(host.cores)
    node = _Node(cluster, host, keys, open_checkpoint(model))
    try:
        node.run(patience)
    finally:
        node.close()


class _Node:
    """One node, from its Join to its end."""

    def __init__(self, cluster: Cluster, host: Host, keys: KeyPair, checkpoint: Checkpoint) -> None:
        self._cluster = cluster
        self._host = host
        self._keys = keys
        self._checkpoint = checkpoint
        self._link = ControlLink(cluster.launcher, keys, on_stop=self._stop, on_gone=self._leave)
        self._lock = threading.Lock()
        self._transport: Metered | None = None
        self._stopped = -1
        self._order: Order | None = None
        self._port = 0
        self._digest = sha256()
        self._since = 0.0
        self._waited = 0.0

    def run(self, patience: float) -> None:
        """Join, and carry out orders."""
        request = JoinRequest(
            protocol=PROTOCOL,
            version=version("moesched"),
            rank=self._host.rank,
            model=fingerprint(self._checkpoint),
            process=os.getpid(),
        )
        welcome = self._link.join(request, patience)
        try:
            job = NodeJob(
                self._checkpoint,
                welcome.run,
                memory=self._host.memory_bytes,
                on_loading=self._tell_loading,
                on_tokens=self._tell_tokens,
            )
        except BadInput as error:
            self._fail("input", error)
            raise
        with closing(job):
            self._obey(job, welcome)

    def close(self) -> None:
        """Say what is left to be said."""
        self._link.close()

    def _obey(self, job: NodeJob, welcome: Welcome) -> None:
        while True:
            message = self._link.next(STAND_BY_SECONDS)
            match message:
                case None:
                    job.stand_by()
                case Order():
                    self._order = message
                    self._try(partial(self._prepare, job, message))
                case Begin():
                    self._try(partial(self._begin, job, welcome, message))
                case Refused():
                    raise BadInput(message.reason)
                case Quit():
                    return

    def _try(self, act: Callable[[], None]) -> None:
        """Carry out a part of an order; what goes wrong is told to the launcher."""
        try:
            act()
        except (BadInput, PolicyError) as error:
            self._fail("input", error)
            raise
        except RankLost as error:
            self._fail("stopped" if self._is_stopped else "lost", error, error.ranks)
        except TransportError as error:
            self._fail("stopped" if self._is_stopped else "lost", error)
        except MoeschedError as error:
            self._fail("other", error)
            raise
        except Exception as error:
            self._fail("other", MoeschedError(f"{type(error).__name__}: {error}"))
            raise

    def _prepare(self, job: NodeJob, order: Order) -> None:
        sizes, placement = job.prepare(self._ask(order, order.sizes))
        self._port = self._host.port or _free_port(self._host.address)
        self._link.say(
            Prepared(
                epoch=order.epoch,
                order=order.order,
                port=self._port,
                sizes=sizes,
                placement=placement,
            )
        )

    def _begin(self, job: NodeJob, welcome: Welcome, begin: Begin) -> None:
        order = self._order
        assert order is not None, "a launcher begins what it ordered"
        ask = self._ask(order, begin.sizes)
        self._digest = sha256()
        transport = self._open(welcome, begin, ask.node)
        try:
            self._since, self._waited = perf_counter(), 0.0
            for part in job.run(ask, transport):
                self._send(REPORT, part.report)
                if part.recording is not None:
                    self._send(RECORDING, part.recording)
                if part.report.interrupted:
                    raise KeyboardInterrupt
                if transport.error is not None:
                    raise transport.error
                if part.report.failure is not None:
                    self._say_done(part.report.failure)
                    return
            self._say_done("")
        finally:
            self._shut()

    def _ask(self, order: Order, sizes: SizeOptions) -> Ask:
        return Ask(
            nodes=len(order.members),
            node=order.members.index(self._host.rank),
            prompts=order.prompts,
            new_tokens=order.new_tokens,
            first_request=order.first_request,
            sizes=sizes,
        )

    # -- the transport -----------------------------------------------------------------------------

    def _open(self, welcome: Welcome, begin: Begin, node: int) -> Metered:
        opened = Metered(
            meet(
                welcome.transport,
                begin.members,
                node,
                secret=self._keys.secret,
                listen=f"tcp://{listening_at(self._host.address)}:{self._port}",
                epoch=begin.epoch,
                lost_after=welcome.lost_after,
            )
        )
        with self._lock:
            self._transport = opened
            if begin.epoch <= self._stopped:
                opened.stop("the launcher let go of this epoch")
        return opened

    def _shut(self) -> None:
        with self._lock:
            transport, self._transport = self._transport, None
        if transport is not None:
            anyio.run(transport.aclose)

    @property
    def _is_stopped(self) -> bool:
        return self._order is not None and self._order.epoch <= self._stopped

    def _stop(self, stop: Stop) -> None:
        """On the link's thread: leave the step in flight, by leaving its exchanges."""
        with self._lock:
            self._stopped = max(self._stopped, stop.epoch)
            if self._transport is not None:
                self._transport.stop(stop.reason)

    def _leave(self) -> None:
        """On the link's thread: nobody wants anything any more. What does not end by itself is ended."""
        timer = threading.Timer(GRACE_SECONDS, os._exit, (1,))
        timer.daemon = True
        timer.start()
        with self._lock:
            self._stopped = 1 << 62
            if self._transport is not None:
                self._transport.stop("the run is over")

    # -- what is told ------------------------------------------------------------------------------

    def _tell_loading(self, done: int, total: int) -> None:
        if self._order is not None:
            self._link.say(Loading(epoch=self._order.epoch, done=done, total=total))

    def _tell_tokens(self, fresh: dict[int, list[int]], ended: Sequence[int]) -> None:
        """Raises TransportError where the launcher let go of the epoch."""
        order, transport = self._order, self._transport
        if order is None or transport is None or self._is_stopped:
            raise TransportError("the launcher let go of this epoch")
        now, waited = perf_counter(), transport.waited
        self._digest.update(msgspec.msgpack.encode(list(fresh.items())))
        self._link.say(
            Tokens(
                epoch=order.epoch,
                tokens=fresh,
                ended=list(ended),
                seconds=now - self._since,
                waited=waited - self._waited,
            )
        )
        self._since, self._waited = now, waited

    def _send(self, what: str, content: msgspec.Struct) -> None:
        assert self._order is not None
        data = msgspec.msgpack.encode(content)
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            last = start + PIECE_BYTES >= len(data)
            self._link.say(
                Piece(epoch=self._order.epoch, order=self._order.order, what=what, data=piece, last=last)
            )

    def _say_done(self, failure: str) -> None:
        assert self._order is not None
        digest = self._digest.hexdigest()
        self._link.say(Done(epoch=self._order.epoch, order=self._order.order, digest=digest, failure=failure))

    def _fail(self, kind: FailureKind, error: MoeschedError, places: Sequence[int] = ()) -> None:
        """places: the members that are not reached any more."""
        order = self._order
        message = " ".join(str(error).split())
        self._link.say(
            Failed(
                epoch=order.epoch if order else 0,
                order=order.order if order else 0,
                gone=[order.members[place] for place in places] if order else [],
                kind=kind,
                message=message,
            )
        )


def _free_port(address: str) -> int:
    """A port that nobody listens on, for nodes whose ports are not fixed."""
    with socket.socket() as probe:
        place = listening_at(address)
        probe.bind(("" if place == "*" else place, 0))
        port: int = probe.getsockname()[1]
        return port

"""A node of a cluster: joins the launcher, then carries out orders until the run ends or the launcher is gone.

An order is the launcher's request to generate tokens for some prompts. An epoch is a period in which the same nodes
carry out orders together.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from importlib.metadata import version
from pathlib import Path

from moesched.cluster.build import this_build
from moesched.cluster.cluster_file import Cluster, Host, load_cluster
from moesched.cluster.control_link import ControlLink
from moesched.cluster.curve.keys import SECRET_NAME, KeyPair, default_folder, read_keys
from moesched.cluster.handshake import fingerprint
from moesched.cluster.members import GRACE_SECONDS, keep_to
from moesched.cluster.messages import (
    PROTOCOL,
    AllLoaded,
    Begin,
    FailureKind,
    JoinRequest,
    Order,
    Quit,
    Refused,
    Stop,
    Welcome,
)
from moesched.cluster.metered import Metered
from moesched.cluster.node_exchanges import LET_GO, NodeExchanges
from moesched.cluster.node_jobs import NodeJob, NodeOrder
from moesched.cluster.node_reports import NodeReports
from moesched.errors import BadInput, MoeschedError, PolicyError, RankLost, TransportError
from moesched.inputs.defaults import JOIN_SECONDS
from moesched.inputs.options import SizeOptions
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.runs.policy_errors import explained, is_policys

STAND_BY_SECONDS = 0.25
"""Seconds between calls that keep weights in memory: Metal releases memory idle for over 0.5 s (RACS'24, Finding 2)."""

ALL_EPOCHS = 1 << 62
MOST_PATIENCE = 1_000_000


def run_node(
    cluster_file: Path, rank: int, model: Path, *, key: Path | None = None, patience: float = JOIN_SECONDS
) -> None:
    """Run the node `rank` of a cluster with the model's files, until the launcher ends the run.

    Args:
        key: file of the secret key; None for the file that the cluster file names, or else the one that
            `moesched keygen` writes.
        patience: seconds to wait for the launcher's answer.

    Raises:
        BadInput: the launcher refuses the node, or an order cannot be carried out here; the launcher is told why.
        LauncherGone: the launcher is silent.
    """
    if not 0 < patience <= MOST_PATIENCE:
        raise BadInput(f"--patience is {patience:g}: give seconds above 0, at most {MOST_PATIENCE:,}")
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
    node = _Node(cluster, host, keys, open_checkpoint(model, partial=True))
    try:
        node.run(patience)
    finally:
        node.close()


class _Node:
    """One node, from joining to the end of the run."""

    def __init__(self, cluster: Cluster, host: Host, keys: KeyPair, checkpoint: Checkpoint) -> None:
        self._host = host
        self._checkpoint = checkpoint
        self._link = ControlLink(cluster.launcher, keys, on_epoch=self._turn, on_gone=self._leave)
        self._reports = NodeReports(self._link.say)
        self._exchanges = NodeExchanges(host, keys.secret)
        self._transport: Metered | None = None
        self._port = 0

    def run(self, patience: float) -> None:
        """Join the run, waiting up to `patience` seconds for the launcher; carry out orders until the run ends."""
        request = JoinRequest(
            protocol=PROTOCOL,
            version=version("moesched"),
            rank=self._host.rank,
            model=fingerprint(self._checkpoint),
            process=os.getpid(),
            build=this_build(),
        )
        welcome = self._link.join(request, patience)
        try:
            job = NodeJob(
                self._checkpoint,
                welcome.run,
                memory=self._host.memory_bytes,
                on_loading=self._reports.loading,
                on_tokens=self._note_tokens,
            )
        except BadInput as error:
            self._reports.failed("input", error)
            raise
        with closing(job):
            self._obey(job, welcome)

    def close(self) -> None:
        """Send the queued messages to the launcher, and disconnect."""
        self._link.close()

    def _obey(self, job: NodeJob, welcome: Welcome) -> None:
        while True:
            message = self._link.next(STAND_BY_SECONDS)
            match message:
                case None:
                    self._try(job.stand_by)
                case Order():
                    self._reports.order = message
                    self._try(partial(self._prepare, job, message))
                case Begin():
                    self._try(partial(self._begin, job, welcome, message))
                case Refused():
                    raise MoeschedError(message.reason)
                case Quit():
                    return

    def _try(self, act: Callable[[], None]) -> None:
        """Call `act`, a part of an order. Tell the launcher of an error, and raise all but TransportError again."""
        failed = self._reports.failed
        try:
            act()
        except (BadInput, PolicyError) as error:
            failed("input", _told(error))
            raise
        except TransportError as error:
            kind: FailureKind = "stopped" if self._is_stopped else "lost"
            failed(kind, error, error.ranks if isinstance(error, RankLost) else ())
        except MoeschedError as error:
            failed("other", error)
            raise
        except Exception as error:
            failed("other", _told(error))
            raise

    def _prepare(self, job: NodeJob, order: Order) -> None:
        sizes, placement = job.prepare(self._node_order(order, order.sizes))
        self._port = self._exchanges.reserve()
        self._reports.prepared(self._port, sizes, placement)

    def _begin(self, job: NodeJob, welcome: Welcome, begin: Begin) -> None:
        order = self._reports.order
        assert order is not None, "a launcher begins only what it ordered"
        node_order = self._node_order(order, begin.sizes)
        self._transport = self._exchanges.open(
            welcome.transport,
            begin,
            node_order.node,
            port=self._port,
            lost_after=welcome.lost_after,
            on_loaded=self._reports.loaded,
        )
        try:
            self._reports.begin()
            self._run(job, node_order, self._transport)
        finally:
            self._transport = None
            self._exchanges.shut()

    def _run(self, job: NodeJob, node_order: NodeOrder, transport: Metered) -> None:
        for part in job.run(node_order, transport):
            self._reports.content("report", part.report)
            if part.recording is not None:
                self._reports.content("recording", part.recording)
            if part.report.interrupted:
                raise KeyboardInterrupt
            if transport.error is not None:
                raise transport.error
            part.ending.raise_error(part.report)
            if part.report.failure is not None:
                self._reports.done(part.report.failure)
                return
        self._reports.done("")

    def _node_order(self, order: Order, sizes: SizeOptions) -> NodeOrder:
        return NodeOrder(
            nodes=len(order.members),
            node=order.members.index(self._host.rank),
            prompts=order.prompts,
            new_tokens=order.new_tokens,
            first_request=order.first_request,
            sizes=sizes,
        )

    def _note_tokens(self, fresh: dict[int, list[int]], ended: Sequence[int]) -> None:
        """Report new tokens by request, and the requests that ended; raise TransportError if the epoch is over."""
        if self._transport is None or self._is_stopped:
            raise TransportError(LET_GO)
        self._reports.tokens(fresh, ended, self._transport.waited)

    @property
    def _is_stopped(self) -> bool:
        order = self._reports.order
        return order is not None and self._exchanges.is_stopped(order.epoch)

    # -- on the link's thread ----------------------------------------------------------------------

    def _turn(self, said: AllLoaded | Stop) -> None:
        """Allow the exchanges of an epoch (a period with the same nodes) after AllLoaded; fail them after Stop."""
        if isinstance(said, AllLoaded):
            self._exchanges.begin(said.epoch)
        else:
            self._exchanges.stop(said.epoch, said.reason)

    def _leave(self) -> None:
        """Abandon the current step, as the launcher is gone; kill this process if it runs for `GRACE_SECONDS` more."""
        timer = threading.Timer(GRACE_SECONDS, os._exit, (1,))
        timer.daemon = True
        timer.start()
        self._exchanges.stop(ALL_EPOCHS, "the run is over")


def _told(error: Exception) -> MoeschedError:
    """Return the error to report to the launcher; for an error of the policy, it names the policy's line."""
    if is_policys(error):
        return MoeschedError(explained(error)[0])
    return error if isinstance(error, MoeschedError) else MoeschedError(f"{type(error).__name__}: {error}")

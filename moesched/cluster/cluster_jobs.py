"""Jobs on several nodes: N processes of this machine, or the machines of a cluster file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from msgspec.structs import replace

from moesched import plugins
from moesched.cluster.cluster_file import (
    Cluster,
    Host,
    LauncherAddress,
    cluster_toml,
    load_cluster,
    require_known_hosts,
)
from moesched.cluster.cluster_report import cluster_report, write_recordings
from moesched.cluster.control import Control
from moesched.cluster.curve.keys import SECRET_NAME, KeyPair, default_folder, make_keys, read_keys, write_keys
from moesched.cluster.handshake import Expected, fingerprint
from moesched.cluster.launcher import Launch
from moesched.cluster.members import (
    Process,
    Start,
    node_arguments,
    share_cores,
    start_by_others,
    start_by_ssh,
    start_here,
)
from moesched.cluster.messages import Welcome
from moesched.cluster.node_jobs import NodeRun
from moesched.cluster.node_transports import way_of
from moesched.cluster.roster import Roster
from moesched.cluster.token_log import TokenLog
from moesched.errors import BadInput
from moesched.inputs.budgets import read_budgets
from moesched.inputs.defaults import MACHINE
from moesched.inputs.options import DeviceOptions, DTypeOptions, PolicyOptions
from moesched.inputs.prompts import encode_prompts
from moesched.inputs.tokenizer import open_model
from moesched.jobs.batch_reports import JobEnding, NotTraced
from moesched.jobs.options import ClusterOptions, HostsOptions, ProcessesOptions
from moesched.jobs.report import ClusterReport
from moesched.jobs.text_listener import TextListener
from moesched.jobs.trace_file import batch_files, require_outputs_apart
from moesched.keywords import takes
from moesched.machines.local import local_machine
from moesched.options import Option, part_of
from moesched.requests.sampling import Sampling
from moesched.runs.cell_progress import listener_or_cell
from moesched.system.memory import available_memory
from moesched.system.own_loop import interruptible
from moesched.system.scratch import scratch_folder
from moesched.units import parse_bytes

LOOPBACK = "127.0.0.1"


class LocalOptions(ProcessesOptions, ClusterOptions):
    """The options of `run_local`, which runs a model in several processes of this machine."""

    nodes: int = field()
    start: Annotated[
        Callable[[Path], Start],
        Option("Starts the nodes' processes, given a folder for their output.", flag=""),
    ] = start_here


class ClusterFileOptions(HostsOptions, ClusterOptions):
    """The options of `run_cluster`, which runs a model on the nodes of a cluster file."""

    start: Annotated[Start, Option("Starts the nodes' processes.", flag="")] = start_by_ssh


@takes(LocalOptions)
@interruptible()
def run_local(given: LocalOptions) -> ClusterReport:
    """Generate text with several processes of this machine, each with its own cores and its share of the memory.

    Raises:
        BadInput: an argument cannot be used.
        NodeLost: a process ended, and the others cannot go on without it; the error's `report` holds the tokens so far.
    """
    if given.machine == MACHINE:
        read_budgets(given.budgets, local_machine(), here=True, processes=given.nodes)
    with scratch_folder() as folder:
        keys, cluster = _local_cluster(folder, given.nodes)
        return _launch(cluster, folder / "cluster.toml", keys, given.start(folder), given)


@takes(ClusterFileOptions)
@interruptible()
def run_cluster(given: ClusterFileOptions) -> ClusterReport:
    """Generate text with the nodes of a cluster file.

    Raises:
        BadInput: an argument cannot be used.
        NodeLost: a node is lost, and the others cannot go on without it; the error's `report` holds the tokens so far.
    """
    cluster = load_cluster(given.cluster_file)
    require_known_hosts(cluster, str(given.cluster_file))
    if not cluster.launcher.port:
        raise BadInput(
            f"{given.cluster_file}: launcher.port is 0: nodes cannot know the port in advance: choose one"
        )
    named = (given.key or default_folder() / SECRET_NAME).expanduser()
    keys = read_keys(named)
    if keys.public != cluster.launcher.key:
        raise BadInput(
            f"{named} is not the launcher's key in {given.cluster_file}: put the text of its moesched.key there, or "
            "name another --key"
        )
    return _launch(cluster, given.cluster_file, keys, given.start, given)


def run_with_given_ranks(**options: Any) -> ClusterReport:
    """Generate text like `run_cluster(**options)`, but start only node 0: mpirun or the like has started the others."""
    with scratch_folder() as folder:
        here = start_here(folder)

        def start(host: Host, of_node: Sequence[str]) -> Process:
            return here(host, of_node) if host.rank == 0 else start_by_others(host, of_node)

        return run_cluster(start=start, **options)


def _local_cluster(folder: Path, nodes: int) -> tuple[KeyPair, Cluster]:
    """Write keys for `nodes` processes of this machine to a folder; return the launcher's keys and the cluster."""
    memory = available_memory() // nodes
    hosts = []
    for rank, cores in enumerate(share_cores(nodes)):
        keys = write_keys(folder / f"node-{rank}")
        hosts.append(
            Host(
                name=f"local-{rank}",
                address=LOOPBACK,
                port=0,
                rank=rank,
                key=keys.public,
                memory=memory,
                cores=cores,
                secret=f"node-{rank}/{SECRET_NAME}",
            )
        )
    keys = make_keys()
    return keys, Cluster(launcher=LauncherAddress(address=LOOPBACK, port=0, key=keys.public), hosts=hosts)


def _launch(
    cluster: Cluster,
    cluster_file: Path,
    keys: KeyPair,
    start: Start,
    given: ClusterOptions,
) -> ClusterReport:
    transport = plugins.name_elsewhere("transports", given.transport)
    require_outputs_apart(given, cluster_file)
    way_of(transport)  # before anything is started
    checkpoint, tokenizer = open_model(Path(given.model), partial=True)
    stop_tokens = checkpoint.config.stop_tokens
    encoded = encode_prompts(given.prompts, tokenizer, checkpoint.config, given.max_new_tokens)
    node_run = _node_run(given)
    expected = Expected(version=version("moesched"), model=fingerprint(checkpoint))
    listener = listener_or_cell(given.listener)
    texts = TextListener(listener, tokenizer, encoded, 0, stop_tokens, given.max_new_tokens)
    log = TokenLog(encoded, given.max_new_tokens, stop_tokens)
    ending = JobEnding()
    with _control(cluster, cluster_file, keys) as (control, seated):
        welcome = Welcome(run=node_run, lost_after=seated.lost_after, transport=transport)
        processes = _start_all(start, seated, cluster_file, Path(given.model))
        roster = Roster(seated, control, processes, expected, welcome)
        launch = Launch(roster, log, given.sizes, listener.loading, texts.tell_all)
        try:
            with ending:
                launch.run()
        finally:
            roster.end(interrupted=ending.interrupted)
    texts.finish_all()
    listener.ran()
    report = cluster_report(launch, roster, texts.texts, ending)
    if report is None:
        ending.raise_error()
        raise KeyboardInterrupt
    if batch_files(given, 0).wanted:
        with suppress(NotTraced) if ending.error else nullcontext():
            write_recordings(given, launch, roster, report, listener)
    ending.raise_error(report)
    return report


def _node_run(given: ClusterOptions) -> NodeRun:
    named = {
        "policy": plugins.name_elsewhere("policies", given.policy),
        "device": plugins.name_elsewhere("devices", given.device),
    }
    return NodeRun(
        **part_of(given, PolicyOptions, DTypeOptions, DeviceOptions) | named,
        sampling=given.sampling or Sampling(),
        budgets={memory: parse_bytes(size) for memory, size in (given.budgets or {}).items()},
        traced=batch_files(given, 0).wanted,
    )


def _start_all(start: Start, cluster: Cluster, cluster_file: Path, model: Path) -> list[Process]:
    """Start the processes of the cluster's nodes by calls of `start`; if one cannot be started, kill the others."""
    processes: list[Process] = []
    try:
        for host in cluster.hosts:
            processes.append(start(host, node_arguments(cluster_file, host, model.resolve())))
    except BaseException:
        for process in processes:
            process.kill()
        raise
    return processes


@contextmanager
def _control(cluster: Cluster, cluster_file: Path, keys: KeyPair) -> Iterator[tuple[Control, Cluster]]:
    """Open the launcher's control channel with its `keys`; yield the channel, and the cluster with the channel's port.

    If the launcher's port in `cluster` is 0, `cluster_file` is rewritten with the channel's port.
    """
    known = {host.key: host.name for host in cluster.hosts}
    launcher = cluster.launcher
    with closing(Control(launcher.address, launcher.port, keys, known)) as control:
        seated = replace(cluster, launcher=replace(launcher, port=control.port))
        if not launcher.port:
            cluster_file.write_text(cluster_toml(seated))
        yield control, seated

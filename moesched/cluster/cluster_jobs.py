"""Jobs on several nodes: N processes of this machine, or the machines of a cluster file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Unpack

from msgspec.structs import replace

from moesched import plugins
from moesched.cluster.cluster_file import (
    Cluster,
    Host,
    Seat,
    cluster_toml,
    load_cluster,
    require_known_hosts,
)
from moesched.cluster.cluster_report import cluster_report, write_recordings
from moesched.cluster.control import Control
from moesched.cluster.curve.keys import SECRET_NAME, KeyPair, default_folder, make_keys, read_keys, write_keys
from moesched.cluster.fingerprint import fingerprint
from moesched.cluster.handshake import Expected
from moesched.cluster.launcher import Events, Launch
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
from moesched.inputs.options import DeviceOptions, PolicyOptions, options_from, part_of, takes
from moesched.inputs.prompts import Prompt, encode_prompts, require_some
from moesched.inputs.tokenizer import find_tokenizer
from moesched.jobs.batch_reports import JobEnding, NotTraced
from moesched.jobs.options import ClusterKeywords, ClusterOptions
from moesched.jobs.report import ClusterReport
from moesched.jobs.text_listener import TextListener
from moesched.jobs.trace_file import batch_files, require_outputs_apart
from moesched.machines.local import local_machine
from moesched.models.checkpoint import open_checkpoint
from moesched.requests.sampling import Sampling
from moesched.runs.cell_progress import listener_or_cell
from moesched.runs.listeners import Listener
from moesched.seams import Policy
from moesched.system.memory import available_memory
from moesched.system.own_loop import interruptible
from moesched.system.scratch import scratch_folder
from moesched.units import parse_bytes

LOOPBACK = "127.0.0.1"
MOST_LOCAL = 64


@takes(ClusterOptions)
@interruptible()
def run_local(
    model: Path | str,
    prompts: Sequence[Prompt],
    *,
    nodes: int,
    policy: str | type[Policy],
    machine: str = MACHINE,
    start: Callable[[Path], Start] = start_here,
    **options: Unpack[ClusterKeywords],
) -> ClusterReport:
    """Generate text with several processes of this machine, each with its own cores and its share of the memory.

    Args:
        model: a Hugging Face folder.
        prompts: texts, or token ids.
        nodes: number of processes.
        policy: for several nodes: a name of `moesched list policies`, module:Class, file.py:Class, or a class.
        machine: "auto" for this one, a name of `moesched list machines`, or a TOML file.
        start: starts the nodes' processes, given a folder for their output.

    Raises:
        BadInput: an argument cannot be used.
        NodeLost: a process ended, and the others cannot go on without it; `report` of the error holds the tokens so
            far.
    """
    if not 1 <= nodes <= MOST_LOCAL:
        raise BadInput(f"--local is {nodes}: give 1 to {MOST_LOCAL} nodes")
    given = options_from(ClusterOptions, "run_local", options, policy=policy, machine=machine)
    if machine == MACHINE:
        read_budgets(given.budgets, local_machine(), here=True, processes=nodes)
    with scratch_folder() as folder:
        keys, cluster = _local_cluster(folder, nodes)
        return _launch(cluster, folder / "cluster.toml", keys, Path(model), prompts, start(folder), given)


@takes(ClusterOptions)
@interruptible()
def run_cluster(
    model: Path | str,
    prompts: Sequence[Prompt],
    *,
    cluster_file: Path,
    policy: str | type[Policy],
    machine: str = MACHINE,
    key: Path | None = None,
    start: Start = start_by_ssh,
    **options: Unpack[ClusterKeywords],
) -> ClusterReport:
    """Generate text with the nodes of a cluster file.

    Args:
        model: a Hugging Face folder.
        prompts: texts, or token ids.
        cluster_file: nodes, addresses and keys, as docs/cluster.md describes them.
        policy: for several nodes: a name of `moesched list policies`, module:Class, file.py:Class, or a class.
        machine: the machine of each node: "auto", a name of `moesched list machines`, or a TOML file.
        key: the file of the launcher's secret key; by default the one that `moesched keygen` writes.
        start: starts the nodes' processes.

    Raises:
        BadInput: an argument cannot be used.
        NodeLost: a node is lost, and the others cannot go on without it; `report` of the error holds the tokens so far.
    """
    given = options_from(ClusterOptions, "run_cluster", options, policy=policy, machine=machine)
    cluster = load_cluster(cluster_file)
    require_known_hosts(cluster, str(cluster_file))
    if not cluster.launcher.port:
        raise BadInput(
            f"{cluster_file}: launcher.port is 0: nodes cannot know the port in advance: choose one"
        )
    named = (key or default_folder() / SECRET_NAME).expanduser()
    keys = read_keys(named)
    if keys.public != cluster.launcher.key:
        raise BadInput(
            f"{named} is not the launcher's key in {cluster_file}: put the text of its moesched.key there, or name "
            "another --key"
        )
    return _launch(cluster, cluster_file, keys, Path(model), prompts, start, given)


def run_with_given_ranks(
    model: Path | str, prompts: Sequence[Prompt], *, cluster_file: Path, **options: Any
) -> ClusterReport:
    """`run_cluster` for a program such as mpirun that started a process on each node, of which this is the first."""
    with scratch_folder() as folder:
        here = start_here(folder)

        def start(host: Host, of_node: Sequence[str]) -> Process:
            return here(host, of_node) if host.rank == 0 else start_by_others(host, of_node)

        return run_cluster(model, prompts, cluster_file=cluster_file, start=start, **options)


def _local_cluster(folder: Path, nodes: int) -> tuple[KeyPair, Cluster]:
    """A cluster file for processes of this machine, with new keys for all of them."""
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
    return keys, Cluster(launcher=Seat(address=LOOPBACK, port=0, key=keys.public), hosts=hosts)


def _launch(
    cluster: Cluster,
    cluster_file: Path,
    keys: KeyPair,
    model: Path,
    prompts: Sequence[Prompt],
    start: Start,
    given: ClusterOptions,
) -> ClusterReport:
    transport = plugins.name_elsewhere("transports", given.transport)
    require_outputs_apart(given, model, cluster_file)
    require_some(given.max_new_tokens, "--max-new-tokens")
    way_of(transport)  # before anything is started
    checkpoint = open_checkpoint(model, partial=True)
    stop_tokens = checkpoint.config.stop_tokens
    tokenizer = find_tokenizer(checkpoint.directory)
    encoded = encode_prompts(prompts, tokenizer, checkpoint.config, given.max_new_tokens)
    node_run = _node_run(given)
    expected = Expected(version=version("moesched"), model=fingerprint(checkpoint))
    listener = listener_or_cell(given.listener)
    texts = TextListener(listener, tokenizer, encoded, 0, stop_tokens, given.max_new_tokens)
    log = TokenLog(encoded, given.max_new_tokens, stop_tokens)
    ending = JobEnding()
    with _control(cluster, cluster_file, keys) as (control, seated):
        welcome = Welcome(run=node_run, lost_after=seated.lost_after, transport=transport)
        processes = _start_all(start, seated, cluster_file, model)
        roster = Roster(seated, control, processes, expected, welcome)
        launch = Launch(roster, log, given.sizes, _LaunchEvents(listener, texts))
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
        **part_of(given, PolicyOptions, DeviceOptions) | named,
        sampling=given.sampling or Sampling(),
        machine=given.machine,
        budgets={memory: parse_bytes(size) for memory, size in (given.budgets or {}).items()},
        traced=batch_files(given, 0).wanted,
    )


def _start_all(start: Start, cluster: Cluster, cluster_file: Path, model: Path) -> list[Process]:
    """The nodes' processes; all or none."""
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
    """The control channel, and the cluster with its port; writes the cluster file where the port was left open."""
    known = {host.key: host.name for host in cluster.hosts}
    seat = cluster.launcher
    with closing(Control(seat.address, seat.port, keys, known)) as control:
        seated = replace(cluster, launcher=replace(seat, port=control.port))
        if not seat.port:
            cluster_file.write_text(cluster_toml(seated))
        yield control, seated


class _LaunchEvents(Events):
    """Forwards a launch's events to the run's listener."""

    def __init__(self, listener: Listener, texts: TextListener) -> None:
        self._listener = listener
        self._texts = texts

    def loading(self, done: int, total: int) -> None:
        """Pages were loaded."""
        self._listener.loading(done, total)

    def tokens(self, fresh: dict[int, list[int]]) -> None:
        """Tokens were generated."""
        for request, tokens in fresh.items():
            for token in tokens:
                self._texts.tell({request: token})

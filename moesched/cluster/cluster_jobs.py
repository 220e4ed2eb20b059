"""Jobs on several nodes, in one call each: N processes of this machine, or the machines of a cluster file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import replace

from moesched.cluster.cluster_file import (
    Cluster,
    Host,
    Seat,
    cluster_toml,
    load_cluster,
    require_known_hosts,
)
from moesched.cluster.cluster_report import cluster_report, write_traces
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
from moesched.cluster.messages import SizesMessage, Welcome
from moesched.cluster.node_jobs import NodeRun
from moesched.cluster.node_transports import way_of
from moesched.cluster.roster import Roster
from moesched.cluster.token_log import TokenLog
from moesched.errors import BadInput, NodeLost
from moesched.inputs.lookup import NEW_TOKENS_OF_PROMPTS
from moesched.inputs.prompts import Prompt, encode_prompts, find_tokenizer, require_some
from moesched.jobs.batch_reports import NotTraced
from moesched.jobs.report import ClusterReport
from moesched.jobs.text_listener import TextListener
from moesched.machines.local import available_memory
from moesched.models.checkpoint import open_checkpoint
from moesched.requests.sampling import Sampling
from moesched.runs.listeners import Listener
from moesched.trace.whole_file import require_writable
from moesched.units import parse_bytes

LOOPBACK = "127.0.0.1"
TRANSPORT = "zeromq"
MOST_LOCAL = 64


def run_local(
    model: Path | str,
    prompts: Sequence[Prompt],
    *,
    nodes: int,
    start: Callable[[Path], Start] = start_here,
    **arguments: Any,
) -> ClusterReport:
    """Generate text with several processes of this machine, each with its own cores and its share of the memory.

    Args:
        nodes: how many.
        start: what starts the nodes' processes, given a folder for what they say.
        arguments: those of `run_cluster`.

    Raises:
        BadInput: something that was given cannot be used.
        NodeLost: a process ended, and the others cannot do without it; `report` of the error holds the tokens so far.
    """
    if not 1 <= nodes <= MOST_LOCAL:
        raise BadInput(f"--local is {nodes}: give 1 to {MOST_LOCAL} nodes")
    with TemporaryDirectory(prefix="moesched-") as name:
        folder = Path(name)
        keys, cluster = _local_cluster(folder, nodes)
        return _launch(
            cluster, folder / "cluster.toml", keys, Path(model), prompts, start(folder), **arguments
        )


def run_cluster(
    model: Path | str,
    prompts: Sequence[Prompt],
    *,
    cluster_file: Path,
    key: Path | None = None,
    start: Start = start_by_ssh,
    **arguments: Any,
) -> ClusterReport:
    """Generate text with the nodes of a cluster file.

    Args:
        key: the file of the launcher's secret key; by default where `moesched keygen` puts it.
        start: what starts the nodes' processes.
        arguments: policy, settings, max_new_tokens, dtype, sampling, batch_size, micro_batch_size, prefill_chunk,
            device, device_settings, machine, budgets, trace and listener are as in `run_model`, but
            that they hold for each node; `transport` is what carries the nodes' exchanges.

    Raises:
        BadInput: something that was given cannot be used.
        NodeLost: a node is gone, and the others cannot do without it; `report` of the error holds the tokens so far.
    """
    cluster = load_cluster(cluster_file)
    require_known_hosts(cluster, str(cluster_file))
    if not cluster.launcher.port:
        raise BadInput(
            f"{cluster_file}: launcher.port is 0: nodes cannot know which one that will be: choose one"
        )
    named = (key or default_folder() / SECRET_NAME).expanduser()
    keys = read_keys(named)
    if keys.public != cluster.launcher.key:
        raise BadInput(
            f"{named} is not the launcher's key in {cluster_file}: put the text of its moesched.key there, or name "
            "another --key"
        )
    return _launch(cluster, cluster_file, keys, Path(model), prompts, start, **arguments)


def run_with_given_ranks(
    model: Path | str, prompts: Sequence[Prompt], *, cluster_file: Path, **arguments: Any
) -> ClusterReport:
    """`run_cluster` where others, such as mpirun, have started a process on each node, and this is the first one."""
    with TemporaryDirectory(prefix="moesched-") as name:
        here = start_here(Path(name))

        def start(host: Host, of_node: Sequence[str]) -> Process:
            return here(host, of_node) if host.rank == 0 else start_by_others(host, of_node)

        return run_cluster(model, prompts, cluster_file=cluster_file, start=start, **arguments)


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
    *,
    policy: str,
    settings: Mapping[str, Any] | None = None,
    max_new_tokens: int = NEW_TOKENS_OF_PROMPTS,
    dtype: str | None = None,
    sampling: Sampling | None = None,
    batch_size: int | None = None,
    micro_batch_size: int | None = None,
    prefill_chunk: int | None = None,
    device: str = "torch",
    device_settings: Mapping[str, Any] | None = None,
    machine: str = "auto",
    budgets: Mapping[str, int | str] | None = None,
    transport: str = TRANSPORT,
    trace: Path | str | None = None,
    listener: Listener | None = None,
) -> ClusterReport:
    require_writable(trace, "trace")
    require_some(max_new_tokens, "--max-new-tokens")
    way_of(transport)  # before anything is started
    checkpoint = open_checkpoint(model)
    config = checkpoint.config
    tokenizer = find_tokenizer(checkpoint.directory)
    encoded = encode_prompts(prompts, tokenizer, config, max_new_tokens)
    run = NodeRun(
        policy=policy,
        settings=dict(settings or {}),
        dtype=dtype,
        sampling=sampling or Sampling(),
        device=device,
        device_settings=dict(device_settings or {}),
        machine=machine,
        budgets={memory: parse_bytes(size) for memory, size in (budgets or {}).items()},
        traced=trace is not None,
    )
    expected = Expected(version=version("moesched"), model=fingerprint(checkpoint))
    sizes = SizesMessage(
        batch_size=batch_size, micro_batch_size=micro_batch_size, prefill_chunk=prefill_chunk
    )
    listener = listener or Listener()
    text_listener = TextListener(listener, tokenizer, encoded, 0, config.stop_tokens, max_new_tokens)
    log = TokenLog(encoded, max_new_tokens, config.stop_tokens)
    interrupted, lost = False, None
    with _control(cluster, cluster_file, keys) as (control, seated):
        welcome = Welcome(run=run, lost_after=seated.lost_after, transport=transport)
        processes = _start_all(start, seated, cluster_file, model)
        roster = Roster(seated, control, processes, expected, welcome)
        launch = Launch(roster, log, sizes, _Told(listener, text_listener))
        try:
            launch.run()
        except KeyboardInterrupt:
            interrupted = True
        except NodeLost as error:
            lost = error
        finally:
            roster.end()
    text_listener.finish_all()
    listener.ran()
    report = cluster_report(launch, roster, text_listener.texts, interrupted=interrupted, lost=lost)
    if trace is not None and report is not None:
        with suppress(NotTraced) if lost else nullcontext():
            write_traces(Path(trace), launch, roster, report, listener)
    if lost is not None:
        lost.report = report
        raise lost
    if report is None:
        raise KeyboardInterrupt
    return report


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
    """The control channel, and the cluster with the port that it has; a file made for this run is written with it."""
    known = {host.key: host.name for host in cluster.hosts}
    seat = cluster.launcher
    with closing(Control(seat.address, seat.port, keys, known)) as control:
        seated = replace(cluster, launcher=replace(seat, port=control.port))
        if not seat.port:
            cluster_file.write_text(cluster_toml(seated))
        yield control, seated


class _Told(Events):
    """Tells a run's listener of what a launch tells."""

    def __init__(self, listener: Listener, text_listener: TextListener) -> None:
        self._listener = listener
        self._teller = text_listener

    def loading(self, done: int, total: int) -> None:
        """Pages."""
        self._listener.loading(done, total)

    def tokens(self, fresh: dict[int, list[int]]) -> None:
        """Tokens."""
        for request, tokens in fresh.items():
            for token in tokens:
                self._teller.tell({request: token})

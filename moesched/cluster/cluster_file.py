"""Reads and writes the cluster file: the nodes, their addresses, resources and public keys.

An example:

    network = "10gbe"

    [launcher]
    address = "mac-0.lan"
    port = 7000
    key = "..."

    [[hosts]]
    name = "mac-0"
    address = "mac-0.lan"
    port = 7001
    rank = 0
    memory = "150GB"
    cores = [0, 1, 2, 3]
    key = "..."
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from moesched.cluster.curve.keys import key_problem
from moesched.cluster.endpoints import is_ipv6, plain_address
from moesched.errors import BadInput
from moesched.machines.toml_text import inline
from moesched.system.decoding import decode_toml, fault
from moesched.system.input_file import read_input
from moesched.system.plain_text import shown
from moesched.units import parse_bytes

MOST_BYTES = 1_000_000
"""Largest number of bytes of a cluster file; a file with 1,000 nodes has 250 kB."""

Port = Annotated[int, Meta(ge=0, le=65535)]
Seconds = Annotated[float, Meta(gt=0, lt=1e9)]


class LauncherAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The launcher's address and public key.

    Attributes:
        port: the port that the launcher listens on; 0 for a free one, which only `run_local` can use.
        key: the launcher's public key, by which nodes recognise it.
    """

    address: str
    port: Port
    key: str


PartT = TypeVar("PartT", LauncherAddress, "Host")


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One node of a cluster file.

    Attributes:
        address: the address at which other nodes reach this node.
        port: the port on which the node listens for other nodes; 0 for a free one.
        memory: all memory that the node may use, in bytes or as text such as "150GB"; by default the machine's
            capacity.
        cores: the cores that the node may use; an empty list means all.
        key: the node's public key.
        ssh: the destination for `ssh`, by which the launcher starts the node, such as "me@mac-0"; by default `address`.
        model: the model's folder or file on the node's machine, if the path differs from the launcher's.
        command: the command that starts moesched on that machine.
        secret: the file on that machine with the node's secret key; by default the one that `moesched keygen` writes.
    """

    name: str
    address: str
    port: Port
    rank: Annotated[int, Meta(ge=0)]
    key: str
    memory: int | str | None = None
    cores: list[Annotated[int, Meta(ge=0)]] = []
    ssh: str = ""
    model: str = ""
    command: str = "moesched"
    secret: str = ""

    @property
    def memory_bytes(self) -> int | None:
        """All memory that the node may use, in bytes; None if the file does not limit it."""
        return None if self.memory is None else parse_bytes(self.memory)

    def __str__(self) -> str:
        return f"node {self.rank} ({self.name})"


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster file's content; `hosts` are in the order of their ranks.

    Attributes:
        network: the name of a network profile; only predictions use it.
        lost_after: seconds of silence after which a node, or the launcher, counts as lost. A process that shares its
            cores with many others can be silent for more than 5 s.
    """

    launcher: LauncherAddress
    hosts: list[Host]
    network: str | None = None
    lost_after: Seconds = 15.0

    def host(self, rank: int) -> Host:
        """Return the node of a rank.

        Raises:
            BadInput: no node has this rank.
        """
        if not 0 <= rank < len(self.hosts):
            raise BadInput(
                f"--rank is {rank}, and the cluster file has the ranks 0 to {len(self.hosts) - 1}: give one of those"
            )
        return self.hosts[rank]


def load_cluster(path: Path) -> Cluster:
    """Read a cluster file.

    Raises:
        BadInput: the file cannot be read, or its content is invalid; the message names the file and the key.
    """
    return parse_cluster(read_input(path, "cluster file", MOST_BYTES), str(path))


def parse_cluster(text: bytes, where: str) -> Cluster:
    """Parse the text of a cluster file; `where` names the file in messages.

    Raises:
        BadInput: the text is not TOML, or a key is missing, unknown or has an invalid value. The message names `where`
            and the key.
    """
    raw = decode_toml(text, f"{where}: not a cluster file")
    try:
        cluster = msgspec.convert(raw, Cluster)
    except msgspec.ValidationError as error:
        message, path = fault(error, raw)
        at = path.lstrip(".")
        raise BadInput(
            f"{where}: {at}: {message}" if at else f"{where}: not a cluster file: {message}"
        ) from None
    cluster = _with_plain_addresses(cluster)
    for problem in _problems(cluster):
        raise BadInput(f"{where}: {problem}")
    return msgspec.structs.replace(cluster, hosts=sorted(cluster.hosts, key=lambda host: host.rank))


def _with_plain_addresses(cluster: Cluster) -> Cluster:
    def plain(part: PartT) -> PartT:
        return msgspec.structs.replace(part, address=plain_address(part.address))

    return msgspec.structs.replace(
        cluster, launcher=plain(cluster.launcher), hosts=[plain(host) for host in cluster.hosts]
    )


LookUp = Callable[[str, None, int], object]
"""Function like `socket.getaddrinfo`: resolves a host name for a family of addresses, or raises OSError."""


def require_known_hosts(cluster: Cluster, where: str, look_up: LookUp = socket.getaddrinfo) -> None:
    """Check that the system can resolve the address of each host; names must have an IPv4 address.

    Args:
        where: the file's name, for messages.
        look_up: resolves a host name.

    Raises:
        BadInput: an address cannot be resolved; the message names its key in the file.
    """
    places = [("launcher", cluster.launcher.address)]
    places += [(f"hosts[{number}]", host.address) for number, host in enumerate(cluster.hosts)]
    for key, address in places:
        try:
            look_up(address, None, socket.AF_INET6 if is_ipv6(address) else socket.AF_INET)
        except (OSError, UnicodeError):
            raise BadInput(
                f"{where}: {key}.address: {address!r} is an unknown host, or has no IPv4 address: correct it, or "
                "write its IP address"
            ) from None


def cluster_toml(cluster: Cluster) -> str:
    """Return the text of the cluster's file, in TOML."""
    fields = msgspec.to_builtins(cluster)
    hosts, launcher = fields.pop("hosts"), fields.pop("launcher")
    lines = [*_lines(fields), "", "[launcher]", *_lines(launcher)]
    for host in hosts:
        lines += ["", "[[hosts]]", *_lines(host)]
    return "\n".join(lines) + "\n"


def _lines(fields: dict[str, Any]) -> Iterator[str]:
    return (f"{key} = {inline(value)}" for key, value in fields.items() if value not in (None, "", []))


def _problems(cluster: Cluster) -> Iterator[str]:
    """Yield messages on invalid values of a cluster file whose keys and types are right; each begins with the key."""
    if not cluster.hosts:
        yield "hosts: the list is empty: describe each node in a [[hosts]] table"
    yield from _key_problem("launcher.key", cluster.launcher.key)
    yield from _rank_problems(cluster.hosts)
    keys: dict[str, str] = {}
    ports: dict[tuple[str, int], str] = {(cluster.launcher.address, cluster.launcher.port): "the launcher"}
    for number, host in enumerate(cluster.hosts):
        key = f"hosts[{number}]"
        yield from _key_problem(f"{key}.key", host.key)
        for name, place in (("address", host.address), ("ssh", host.ssh)):
            if place.startswith("-"):
                yield f"{key}.{name}: {place!r} begins with a dash, so that ssh may take it for an option: write a host"
        for name, text in msgspec.structs.asdict(host).items():
            if isinstance(text, str) and "\0" in text:
                yield f"{key}.{name}: {shown(text)} has a zero byte, which no host and no path has: remove it"
        if keys.setdefault(host.key, str(host)) != str(host):
            yield f"{key}.key: it is also the key of {keys[host.key]}: make one for each with `moesched keygen`"
        other = ports.setdefault((host.address, host.port), str(host)) if host.port else str(host)
        if other != str(host):
            yield f"{key}.port: {host.port} is also the port of {other}, at the same address: choose another one"
        try:
            if host.memory_bytes is not None and host.memory_bytes <= 0:
                yield f"{key}.memory: {host.memory} is not a capacity: it must be positive"
        except BadInput as error:
            yield f"{key}.memory: {error}"


def _rank_problems(hosts: Sequence[Host]) -> Iterator[str]:
    seen: dict[int, str] = {}
    names: dict[str, int] = {}
    for number, host in enumerate(hosts):
        if host.rank in seen:
            yield (
                f"hosts[{number}].rank: {host.rank} is the rank of {seen[host.rank]!r} and of {host.name!r}: "
                "give each node a rank of its own"
            )
        if host.name in names:
            other = f"hosts[{names[host.name]}]"
            yield f"hosts[{number}].name: {host.name!r} is also the name of {other}: choose another one"
        seen[host.rank] = host.name
        names[host.name] = number
    for rank in range(len(hosts)):
        if rank not in seen:
            yield (
                f"hosts: the ranks of {len(hosts)} nodes are 0 to {len(hosts) - 1}, and none has rank {rank}: "
                "number them without gaps"
            )


def _key_problem(key: str, text: str) -> Iterator[str]:
    problem = key_problem(text)
    if problem:
        yield f"{key}: {problem}: copy the text of its moesched.key"

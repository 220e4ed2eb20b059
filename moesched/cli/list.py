"""`moesched list`: lists the names of policies, models, machines and more, with the reason if one cannot load."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.failures import tell
from moesched.cli.output import Bar, print_json
from moesched.cli.tables import print_table
from moesched.errors import BadInput
from moesched.options import Option
from moesched.units import format_bytes, format_count, format_flops, format_seconds

EPILOGUE = """Examples:

  moesched list policies
  moesched list parts "RTX 30"
  moesched list devices --json"""

Entry = dict[str, Any]

Kind = Literal[
    "policies", "devices", "transports", "kernels", "models", "machines", "parts", "networks", "workloads"
]


@command(EPILOGUE, name="list")
def list_kind(
    kind: Annotated[Kind, Option("Kind of thing to list.", flag="KIND")],
    containing: Annotated[
        str,
        Option("List only names that contain this text.", "TEXT", flag="CONTAINING"),
    ] = "",
    *,
    json: options.Json = False,
) -> None:
    """List what there is to choose from: policies, models, machines, networks, workloads and more.

    Plug-ins of other packages are included. Those that cannot load are listed with the reason. If several kernels can
    compute an operation for given inputs, the one that is listed first does so.
    """
    wanted, listing = containing.lower(), LISTINGS[kind]
    with Bar(f"looking at {kind}"):  # devices and kernels load their libraries
        found = listing.entries()
    entries = [each for each in found if wanted in f"{each['name']} {each.get('operation', '')}".lower()]
    if json:
        print_json({kind: entries})
        return
    if wanted and not entries:
        tell(f"none of the {kind} has {containing!r} in its name")
        return
    print_table(
        [listing.title or kind, *listing.columns],
        [listing.row(each) for each in entries],
        spare=listing.spare,
    )


def _named(entry: Entry) -> list[str]:
    return [entry["name"], _state(entry)]


def _state(entry: Entry) -> str:
    problem = entry.get("problem")
    return f"cannot load: {problem}" if problem else str(entry["description"])


def _plugins(kind: Any) -> list[Entry]:
    from moesched import plugins

    entries = []
    for name in plugins.names(kind):
        entry = {"name": name, "description": "", "problem": None}
        try:
            entry["description"] = _first_sentence(plugins.find(kind, name))
        except Exception as error:  # a plug-in may fail in any way, and must not hide the others
            entry["problem"] = " ".join(str(error).split()) or type(error).__name__
        entries.append(entry)
    return entries


def _kernels() -> list[Entry]:
    """Return an entry per kernel: operation, devices, cases that it computes, and the reason if it cannot run here."""
    from moesched import plugins
    from moesched.seams import KernelRow, ListsKernels

    devices: dict[KernelRow, list[str]] = {}
    for name in plugins.names("devices"):
        device: Any = None if plugins.problem("devices", name) else plugins.find("devices", name)
        for row in device.kernel_rows() if isinstance(device, ListsKernels) else ():
            devices.setdefault(row, []).append(name)
    return [{**row._asdict(), "devices": names} for row, names in devices.items()]


def _kernel_row(entry: Entry) -> list[str]:
    here = entry["problem"] or "yes"
    return [entry["operation"], entry["name"], entry["takes"], ", ".join(entry["devices"]), here]


def _models() -> list[Entry]:
    """Return an entry per model: family, sizes, numbers of all and of active weights, format, bytes, and source."""
    from moesched.models.architectures import ARCHITECTURES
    from moesched.models.tensors import count_active_weights, count_weights, file_bytes

    return [
        {
            "name": config.name,
            "description": f"{architecture.sources[config.name]}; family {family}, "
            + ("runs" if architecture.runs else "only simulated"),
            "family": family,
            "runs": architecture.runs,
            "parameters": count_weights(config),
            "active_parameters": count_active_weights(config, architecture.left_out),
            "layers": config.layers,
            "experts": config.routed.experts,
            "top_k": config.routed.top_k,
            "format": config.format or "bf16",
            "formats": list(architecture.formats),
            "bytes": file_bytes(config),
            "source": architecture.sources[config.name],
        }
        for family, architecture in ARCHITECTURES.items()
        for config in architecture.shapes
    ]


def _model_row(entry: Entry) -> list[str]:
    parameters = (format_count(entry[key]) for key in ("parameters", "active_parameters"))
    sizes = (str(entry[key]) for key in ("layers", "experts", "top_k"))
    runs = "runs" if entry["runs"] else "simulated"
    file = [entry["format"], format_bytes(entry["bytes"])]
    return [entry["name"], *parameters, *sizes, *file, runs, entry["source"]]


def _machines() -> list[Entry]:
    """Return an entry per machine: bytes of each memory, bytes per second of each link, number of accelerators."""
    from moesched.inputs.lookup import find_machine
    from moesched.machines import Machine, machine_names

    def figures(machine: Machine) -> Entry:
        return {
            "accelerators": machine.accelerator_group.count,
            "accelerator_memory": machine.accelerator.memory,
            "page_locked_memory": machine.host.memory if machine.page_locked else None,
            "memories": {name: tier.nbytes for name, tier in machine.memories.items()},
            "links": {f"{link.source}->{link.destination}": link.bandwidth for link in machine.links},
        }

    return [_loaded(name, find_machine, figures) for name in ("auto", *machine_names())]


def _machine_row(entry: Entry) -> list[str]:
    """Return the cells of a machine: its name, sizes of memories, rates of links, and its description."""
    memories = []
    for name, nbytes in entry.get("memories", {}).items():
        several = entry["accelerators"] > 1 and name == entry["accelerator_memory"]
        times = f"{entry['accelerators']} x " if several else ""
        locked = " page-locked" if name == entry["page_locked_memory"] else ""
        memories.append(f"{name} {times}{format_bytes(nbytes)}{locked}")
    links = [f"{name} {format_bytes(rate)}/s" for name, rate in entry.get("links", {}).items()]
    return [entry["name"], ", ".join(memories), ", ".join(links), _state(entry)]


def _parts() -> list[Entry]:
    """Return every part of the library: its name, its kind, its figures, and their source."""
    from moesched.machines.parts import library

    parts = library()
    return [
        {"name": part.name, "kind": kind, **msgspec.to_builtins(part)}
        for kind, listed in {**parts.named, "memory": parts.memories}.items()
        for part in listed.values()
    ]


def _part_row(entry: Entry) -> list[str]:
    return [entry["name"], entry["kind"], _part_figures(entry), entry["source"]]


def _part_figures(entry: Entry) -> str:
    if entry["kind"] == "memory":
        return f"{entry['slowest']} to {entry['fastest']} million transfers/s"
    if entry["kind"] == "cpu":
        cores = f"{entry['cores']} cores at {entry['clock'] / 1e9:g} GHz"
        return f"{cores}, {entry['channels']} channels of {entry['memory']}, PCIe {entry['pcie']}.0"
    bandwidth, half = f"{format_bytes(entry['bandwidth'])}/s", f"{format_flops(entry['half'])} in 16 bits"
    if entry["kind"] == "chip":
        return f"up to {entry['largest']} at {bandwidth}, {half}, {entry['cores']} CPU cores"
    slot = f"{entry['watts']} W, PCIe {entry['pcie']}, {entry['device_class']}"
    return f"{entry['memory']} at {bandwidth}, {half}, {slot}"


def _networks() -> list[Entry]:
    """Return an entry per network: latency in seconds, bytes per second, and price of a network card in USD."""
    from moesched.machines.networks import Network, load_network, network_names

    def figures(network: Network) -> Entry:
        return {key: getattr(network, key) for key in ("latency_seconds", "bandwidth", "price_usd")}

    return [_loaded(name, load_network, figures) for name in network_names()]


def _network_row(entry: Entry) -> list[str]:
    figures = ["", ""]
    if not entry["problem"]:
        figures = [format_seconds(entry["latency_seconds"]), f"{format_bytes(entry['bandwidth'])}/s"]
    return [entry["name"], *figures, _state(entry)]


def _workloads() -> list[Entry]:
    from moesched.requests.workloads import load_workload, workload_names

    return [_loaded(name, load_workload, lambda workload: {}) for name in workload_names()]


def _loaded(name: str, load: Callable[[str], Any], figures: Callable[[Any], Entry]) -> Entry:
    """Load a named object, and return its entry: description and figures, or the reason why it cannot be loaded.

    Args:
        load: takes the name, and returns the object.
        figures: takes the object, and returns further fields of the entry.
    """
    try:
        found = load(name)
    except BadInput as error:
        return {"name": name, "description": "", "problem": str(error)}
    return {"name": name, "description": found.description, "problem": None, **figures(found)}


def _first_sentence(found: object) -> str:
    """Return the first sentence of an object's docstring, or the first paragraph if that has no full stop."""
    text = " ".join((inspect.getdoc(found) or "").split("\n\n", 1)[0].split())
    sentence = re.match(r".*?[.!?](?= [A-Z`]|$)", text)
    return sentence[0] if sentence else text


class Listing(NamedTuple):
    """The table that `moesched list` prints for one kind of thing.

    Attributes:
        entries: returns an entry for each thing: its name, its description or figures, and the reason if it cannot
            load.
        columns: titles of the table's columns after the first one.
        row: takes an entry, and returns the cells of its row.
        spare: titles of columns that are left out on a narrow terminal, beginning with the first of these.
        title: title of the first column; empty for the name of the kind.
    """

    entries: Callable[[], list[Entry]]
    columns: Sequence[str] = ("",)
    row: Callable[[Entry], list[str]] = _named
    spare: Sequence[str] = ()
    title: str = ""


MODEL_COLUMNS = ("parameters", "active", "layers", "experts", "top k", "format", "bytes", "", "source")

LISTINGS: dict[Kind, Listing] = {
    "policies": Listing(partial(_plugins, "policies")),
    "devices": Listing(partial(_plugins, "devices")),
    "transports": Listing(partial(_plugins, "transports")),
    "kernels": Listing(
        _kernels, ("kernel", "takes", "devices", "here"), _kernel_row, ["devices"], "operation"
    ),
    "models": Listing(_models, MODEL_COLUMNS, _model_row, ["source", "active", "top k"]),
    "machines": Listing(_machines, ("memories", "links", ""), _machine_row, ["links"]),
    "parts": Listing(_parts, ("kind", "figures", "source"), _part_row),
    "networks": Listing(_networks, ("latency", "bandwidth", ""), _network_row),
    "workloads": Listing(_workloads),
}

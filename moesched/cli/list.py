"""`moesched list`: names of policies, models, machines and more, with the reason if one cannot load."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Annotated, Any, Literal

from moesched.cli import options
from moesched.cli.command import command
from moesched.cli.list_parts import part_entries, part_rows
from moesched.options import Option

EPILOGUE = """Examples:

  moesched list policies
  moesched list parts "RTX 30"
  moesched list devices --json"""

Kind = Literal[
    "policies", "devices", "transports", "kernels", "models", "machines", "parts", "networks", "workloads"
]


@command(4, EPILOGUE, name="list")
def list_kind(
    kind: Annotated[Kind, Option("Kind of thing to list.", flag="KIND")],
    containing: Annotated[
        str,
        Option("List only names that contain this text.", "TEXT", flag="CONTAINING"),
    ] = "",
    *,
    json: options.Json = False,
) -> None:
    """List the names of policies, devices, transports, kernels, models, machines, parts of machines, networks or
    workloads.

    Plug-ins of other packages are included. Those that cannot load are listed with the reason. Of the kernels for an
    operation, the first one that takes a case computes it.
    """
    from moesched.cli.output import print_json
    from moesched.cli.tables import print_table

    wanted = containing.lower()
    entries = [
        entry
        for entry in entries_of(kind)
        if wanted in f"{entry['name']} {entry.get('operation', '')}".lower()
    ]
    if json:
        print_json({kind: entries})
        return
    if kind == "machines":
        rows = [[entry["name"], *_machine_figures(entry), _state(entry)] for entry in entries]
        print_table([kind, "memories", "links", ""], rows, spare=["links"])
    elif kind == "models":
        columns = ["parameters", "active", "layers", "experts", "top k", "format", "bytes", "", "source"]
        rows = [[entry["name"], *_model_figures(entry)] for entry in entries]
        print_table([kind, *columns], rows, spare=["source", "active", "top k"])
    elif kind == "parts":
        print_table([kind, "kind", "figures", "source"], part_rows(entries))
    elif kind == "kernels":
        rows = [
            [
                entry["operation"],
                entry["name"],
                entry["takes"],
                ", ".join(entry["devices"]),
                entry["problem"] or "yes",
            ]
            for entry in entries
        ]
        print_table(["operation", "kernel", "takes", "devices", "here"], rows, spare=["devices"])
    elif kind == "networks":
        rows = [[entry["name"], *_network_figures(entry), _state(entry)] for entry in entries]
        print_table([kind, "latency", "bandwidth", ""], rows)
    else:
        print_table([kind, ""], [[entry["name"], _state(entry)] for entry in entries])


def entries_of(kind: Kind) -> list[dict[str, Any]]:
    """Return every entry of a kind: its name, its description, further figures, and the reason if it cannot load."""
    listed: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "models": _models,
        "machines": _machines,
        "parts": part_entries,
        "kernels": _kernels,
        "networks": _networks,
        "workloads": _workloads,
    }
    return listed[kind]() if kind in listed else _plugins(kind)


def _state(entry: dict[str, Any]) -> str:
    problem = entry.get("problem")
    return f"cannot load: {problem}" if problem else str(entry["description"])


def _plugins(kind: Any) -> list[dict[str, Any]]:
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


def _kernels() -> list[dict[str, Any]]:
    """Return a row per kernel: its operation and devices, the cases it takes, and the reason if it takes none here."""
    from moesched import plugins
    from moesched.seams import KernelRow, ListsKernels

    devices: dict[KernelRow, list[str]] = {}
    for name in plugins.names("devices"):
        device: Any = None if plugins.problem("devices", name) else plugins.find("devices", name)
        for row in device.kernel_rows() if isinstance(device, ListsKernels) else ():
            devices.setdefault(row, []).append(name)
    return [{**row._asdict(), "devices": names} for row, names in devices.items()]


def _models() -> list[dict[str, Any]]:
    """Return a row per model: family, sizes, numbers of all and of active weights, format, bytes, and source."""
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


def _model_figures(entry: dict[str, Any]) -> list[str]:
    from moesched.units import format_bytes, format_count

    parameters = (format_count(entry[key]) for key in ("parameters", "active_parameters"))
    sizes = (str(entry[key]) for key in ("layers", "experts", "top_k"))
    runs = "runs" if entry["runs"] else "simulated"
    return [*parameters, *sizes, entry["format"], format_bytes(entry["bytes"]), runs, entry["source"]]


def _machines() -> list[dict[str, Any]]:
    """Return a row per machine: bytes of each memory, bytes per second of each link, number of accelerators."""
    from moesched.errors import BadInput
    from moesched.inputs.lookup import find_machine
    from moesched.machines import machine_names

    entries = []
    for name in ("auto", *machine_names()):
        entry = _loaded(name, find_machine)
        with suppress(BadInput):
            machine = find_machine(name)
            entry["accelerators"] = machine.accelerator_group.count
            entry["accelerator_memory"] = machine.accelerator.memory
            entry["page_locked_memory"] = machine.host.memory if machine.page_locked else None
            entry["memories"] = {name: tier.nbytes for name, tier in machine.memories.items()}
            entry["links"] = {f"{link.source}->{link.destination}": link.bandwidth for link in machine.links}
        entries.append(entry)
    return entries


def _machine_figures(entry: dict[str, Any]) -> list[str]:
    """Return the sizes of a machine's memories and the rates of its links as text, of several accelerators each."""
    from moesched.units import format_bytes

    memories = []
    for name, nbytes in entry.get("memories", {}).items():
        several = entry["accelerators"] > 1 and name == entry["accelerator_memory"]
        times = f"{entry['accelerators']} x " if several else ""
        locked = " page-locked" if name == entry["page_locked_memory"] else ""
        memories.append(f"{name} {times}{format_bytes(nbytes)}{locked}")
    links = [f"{name} {format_bytes(rate)}/s" for name, rate in entry.get("links", {}).items()]
    return [", ".join(memories), ", ".join(links)]


def _networks() -> list[dict[str, Any]]:
    """Return a row per network: latency in seconds, bytes per second, and price of a network card in USD."""
    from moesched.errors import BadInput
    from moesched.machines.networks import load_network, network_names

    entries = []
    for name in network_names():
        entry = _loaded(name, load_network)
        with suppress(BadInput):
            network = load_network(name)
            entry["latency_seconds"] = network.latency_seconds
            entry["bandwidth"] = network.bandwidth
            entry["price_usd"] = network.price_usd
        entries.append(entry)
    return entries


def _network_figures(entry: dict[str, Any]) -> list[str]:
    from moesched.units import format_bytes, format_seconds

    if entry["problem"]:
        return ["", ""]
    return [format_seconds(entry["latency_seconds"]), f"{format_bytes(entry['bandwidth'])}/s"]


def _workloads() -> list[dict[str, Any]]:
    from moesched.requests.workloads import load_workload, workload_names

    return [_loaded(name, load_workload) for name in workload_names()]


def _loaded(name: str, load: Callable[[str], Any]) -> dict[str, Any]:
    from moesched.errors import BadInput

    try:
        return {"name": name, "description": load(name).description, "problem": None}
    except BadInput as error:
        return {"name": name, "description": "", "problem": str(error)}


def _first_sentence(found: Any) -> str:
    """Return the first sentence of a docstring, or its first paragraph if that has no full stop."""
    text = " ".join((inspect.getdoc(found) or "").split("\n\n", 1)[0].split())
    sentence = re.match(r".*?[.!?](?= [A-Z`]|$)", text)
    return sentence[0] if sentence else text

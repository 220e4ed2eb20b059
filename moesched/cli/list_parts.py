"""The parts of machines, as `moesched list parts` shows them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesched.machines.parts import Part


def part_entries() -> list[dict[str, Any]]:
    """Return every part of the library: its name, its kind, its figures, and their source."""
    import msgspec

    from moesched.machines.parts import library

    parts = library()
    kinds: dict[str, Iterable[Part]] = {
        "gpu": parts.gpus.values(),
        "chip": parts.chips.values(),
        "cpu": parts.cpus.values(),
        "memory": parts.memories.values(),
    }
    return [
        {"name": part.name, "kind": kind, **msgspec.to_builtins(part)}
        for kind, listed in kinds.items()
        for part in listed
    ]


def part_rows(entries: Iterable[dict[str, Any]]) -> list[list[str]]:
    """Return a row of the table for each part: name, kind, figures in words, source."""
    return [[entry["name"], entry["kind"], _figures(entry), entry["source"]] for entry in entries]


def _figures(entry: dict[str, Any]) -> str:
    from moesched.units import format_bytes, format_flops

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

"""Changes a machine's rates and sizes, by texts such as "link.host->gpu=24GB/s"."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.machines.estimates import Estimate
from moesched.machines.machine import PINNED, Machine
from moesched.machines.profiles import machine_from
from moesched.machines.sustained import rates_of
from moesched.units import parse_bytes, parse_flops, parse_rate, parse_seconds

PROPERTIES: dict[str, dict[str, Callable[[str], float]]] = {
    "link": {"bandwidth": parse_rate, "latency": parse_seconds},
    "memory": {"capacity": parse_bytes, "bandwidth": parse_rate, "reserved": parse_bytes},
    "processor": {
        "flops": parse_flops,
        "launch_seconds": parse_seconds,
        "handover_seconds": parse_seconds,
        "expert_bandwidth": parse_rate,
    },
}
"""Properties of a link, a memory and a processor that can be changed; the first is meant if none is named."""

EXAMPLES = "link.host->gpu=24GB/s, memory.gpu.capacity=24GB or processor.gpu.flops=x2"
FACTOR = re.compile(r"x([0-9]*\.?[0-9]+)")


def changed(machine: Machine, changes: Sequence[str]) -> Machine:
    """Return the machine after some changes; its new name lists them.

    Args:
        changes: texts. Each names a part (a link by its lane, a memory or a processor), one of the part's properties,
            and a new value with its unit or a factor, such as "link.host->gpu=24GB/s", "memory.gpu.capacity=x2" or
            "processor.gpu.flops=130TFLOP/s". A processor's flops change in all dtypes.

    Raises:
        BadInput: the machine has no such part, the part has no such property, or the value cannot be read or is
            impossible. Also if a rate is to change and the machine has measured costs, which do not depend on rates.
    """
    for change in changes:
        machine = _changed(machine, change)
    return replace(machine, name=f"{machine.name} with {', '.join(changes)}") if changes else machine


def _changed(machine: Machine, change: str) -> Machine:
    what, equals, value = (part.strip() for part in change.partition("="))
    kind, dot, rest = what.partition(".")
    if not equals or not dot or kind not in PROPERTIES:
        raise BadInput(f"{change!r} changes no link, memory or processor: write, for instance, {EXAMPLES}")
    name, key = rest, next(iter(PROPERTIES[kind]))
    before, dot, last = rest.rpartition(".")
    if dot:
        name, key = before, last
    if key not in PROPERTIES[kind]:
        raise BadInput(f"{change!r}: a {kind} has no {key!r}, only {', '.join(PROPERTIES[kind])}")
    if machine.cost_table and key not in ("capacity", "reserved"):
        raise BadInput(
            f"{change!r}: the costs of machine {machine.name} were measured and do not follow from its rates: "
            "name a machine without measured costs, such as one of `moesched list machines`"
        )
    tables = msgspec.to_builtins(machine)
    parts = _parts(tables, kind, f"{machine.host.memory}->{PINNED}")
    if name not in parts:
        raise BadInput(f"{change!r}: machine {machine.name} has no {kind} {name!r}, only {', '.join(parts)}")
    for part in parts[name]:
        old, estimates = part.get(key), _of_class(machine, kind, name)
        if key in estimates:
            old = estimates[key].expected
        part[key] = new = _new(old, value, PROPERTIES[kind][key], change)
        if key in estimates:
            part["rates"][key] = msgspec.to_builtins(Estimate(low=new, expected=new, high=new, source=change))
    return machine_from(tables, change)


def _of_class(machine: Machine, kind: str, name: str) -> dict[str, Estimate]:
    """Return a processor's estimates, which count instead of what its table states; empty for a link or a memory."""
    return rates_of(machine.processors[name]) if kind == "processor" else {}


def _parts(tables: dict[str, Any], kind: str, staging_lane: str) -> dict[str, list[dict[str, Any]]]:
    """Return the tables of a machine's links, memories or processors, by the name of the part.

    Links that share a lane are listed under the name of the lane.

    Args:
        tables: the machine as dicts and lists.
        kind: "link", "memory" or "processor".
        staging_lane: name of the lane for copies into page-locked memory.
    """
    if kind != "link":
        named = tables["memories" if kind == "memory" else "processors"]
        return {name: [part] for name, part in named.items()}
    lanes: dict[str, list[dict[str, Any]]] = {}
    for link in tables["links"]:
        lanes.setdefault(link["path"] or f"{link['source']}->{link['destination']}", []).append(link)
    if tables["staging"] is not None:
        lanes[staging_lane] = [tables["staging"]]
    return lanes


def _new(old: Any, value: str, parse: Callable[[str], float], change: str) -> Any:
    """Return the new value of a property: the old value times a factor if `value` is like "x2", else `value` parsed.

    Args:
        parse: a function from a text with a unit to a number.
        change: the whole text of the change, for the error message.
    """
    factor = FACTOR.fullmatch(value)
    if factor is None:
        try:
            new = parse(value)
        except BadInput as error:
            raise BadInput(f"{change!r}: {error}") from None
        return dict.fromkeys(old, new) if isinstance(old, dict) else new
    times = float(factor[1])
    if not times:
        raise BadInput(f"{change!r}: a factor is above 0: write, for instance, x2 or x0.5")
    if isinstance(old, dict):
        return {name: each * times for name, each in old.items()}
    if old is None:
        raise BadInput(f"{change!r}: the machine does not give it: give a value, not a factor")
    return int(parse_bytes(old) * times) if parse is parse_bytes else old * times

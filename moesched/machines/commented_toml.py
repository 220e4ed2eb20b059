"""Writes the text of a machine's file, with a comment before each table, as in shipped profiles."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from moesched.machines.machine import Machine
from moesched.machines.toml_text import inline

WIDTH = 118


def commented_toml(machine: Machine, comments: Mapping[str, str], heading: str = "") -> str:
    """Return a machine as TOML text, with a table per processor, memory and link; fields at their defaults are omitted.

    Args:
        comments: text of each comment by the name of its table, such as "processors.gpu", or by a link's lane, such as
            "links.host->gpu".
        heading: text of the comment at the top of the file.
    """
    left = dict(comments)
    blocks = [_comment(heading).rstrip(), "\n".join(_values(machine, ("name", "description", "price_usd")))]
    if machine.accelerator_group.count > 1:
        blocks.append(_table("accelerator_group", machine.accelerator_group, left))
    for name, processor in machine.processors.items():
        blocks.append(_table(f"processors.{name}", processor, left))
    for name, tier in machine.memories.items():
        blocks.append(_table(f"memories.{name}", tier, left))
    for link in machine.links:
        blocks.append(_comment(left.pop(f"links.{link.lane}", "")) + "[[links]]\n" + "\n".join(_values(link)))
    if machine.staging is not None:
        blocks.append(_table("staging", machine.staging, left))
    blocks.append(_table("roles", machine.roles, left))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _table(name: str, fields: msgspec.Struct, comments: dict[str, str]) -> str:
    return _comment(comments.pop(name, "")) + f"[{name}]\n" + "\n".join(_values(fields))


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in textwrap.wrap(text, WIDTH))


def _values(fields: msgspec.Struct, names: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the lines of a table, one for each field that is not at its default.

    Args:
        names: names of the fields to write; all if empty.
    """
    for field in msgspec.structs.fields(fields):
        value = getattr(fields, field.name)
        if value != _default(field) and (not names or field.name in names):
            yield f"{field.name} = {_value(msgspec.to_builtins(value))}"


def _default(field: msgspec.structs.FieldInfo) -> Any:
    """Return a field's default, also if it comes from a factory, such as an empty list."""
    factory = field.default_factory
    return field.default if factory is msgspec.NODEFAULT else factory()


def _value(value: Any) -> str:
    if isinstance(value, dict):
        pairs = [f"{key} = {_value(each)}" for key, each in value.items() if each is not None]
        return "{ " + ", ".join(pairs) + " }"
    return _number(value) if isinstance(value, float) else inline(value)


def _number(value: float) -> str:
    """Format a number as TOML.

    A number with few digits gets an exponent that is a multiple of 3, as in 936e9 or 5e-6.
    """
    short = f"{value:.6g}"
    if float(short) != value:
        return repr(value)
    exponent = int(f"{value:e}".partition("e")[2]) // 3 * 3
    text = f"{value / 10.0**exponent:.6g}e{exponent}"
    return text if exponent and float(text) == value else repr(value)

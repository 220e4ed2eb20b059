"""Writes a machine as TOML text, which `parse_machine` reads."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from moesched.machines import Machine


def machine_toml(machine: Machine) -> str:
    """Return the text of the machine's file: one line for each processor, memory, link and measured point."""
    fields = msgspec.to_builtins(machine)
    tables = {name: fields.pop(name) for name in ("processors", "memories")}
    lines = [f"{name} = {_value(value)}" for name, value in fields.items() if value is not None]
    for name, entries in tables.items():
        lines += ["", f"[{name}]", *(f"{_key(key)} = {inline(entry)}" for key, entry in entries.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return "[\n" + "".join(f"  {inline(each)},\n" for each in value) + "]"
    return inline(value)


def inline(value: Any) -> str:
    """Return a dict, list, text or number as TOML on one line."""
    if isinstance(value, dict):
        pairs = (f"{_key(key)} = {inline(each)}" for key, each in value.items() if each is not None)
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)

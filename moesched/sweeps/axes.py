"""Axes of a sweep: the values of each option of `simulate_model`, from a TOML file and from the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from moesched.errors import BadInput
from moesched.inputs.defaults import WORKLOAD
from moesched.machines.toml_library import MOST_BYTES, Price
from moesched.settings import parse_value
from moesched.system.decoding import decode_toml
from moesched.system.input_file import read_input
from moesched.system.near_names import nearest_of
from moesched.system.plain_text import shown

MODEL = "mixtral-8x7b"
"""The model where none is given."""

Axes = dict[str, list[Any]]
"""The values of each axis, by a keyword of `simulate_model`, or that of a table and a key, such as "settings.ahead"."""

_Size = Annotated[int, Meta(ge=1, le=10**9)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_DType = Literal["float32", "bfloat16", "float16"]
_Setting = bool | int | float | str

_MEANT = {
    _Size: "a whole number from 1 on",
    _Share: "a number from 0 to 1",
    _Setting: "a number, true or false, or text",
    _DType: "float32, bfloat16 or float16",
    Price: "a number of dollars",
    int | str: "a number of bytes, or text such as 600MB",
    int: "a whole number",
    bool: "true or false",
    str: "text",
}
"""The values of each type, in words."""

KINDS: dict[str, Any] = {
    "model": str,
    "format": str,
    "machine": str,
    "nodes": _Size,
    "network": str,
    "tensor_parallel": _Size,
    "workload": str,
    "gen": _Size,
    "requests": _Size,
    "padded": bool,
    "seed": int,
    "beams": _Size,
    "routing": str,
    "preview_accuracy": _Share,
    "dtype": _DType,
    "batch_size": _Size,
    "micro_batch_size": _Size,
    "prefill_chunk": _Size,
    "policy": str,
}
"""The type of each keyword's values."""

TABLES: dict[str, Any] = {
    "machine_set": str,
    "routing_settings": _Setting,
    "budgets": int | str,
    "settings": _Setting,
}
"""The type of the values in each table."""

PRICES = "price"
"""A table that is no axis: dollars per hour, by machine."""

ORDER = (
    "model", "format", "machine", "machine_set", "nodes", "network", "tensor_parallel", "workload", "gen", "requests",
    "padded", "seed", "beams", "routing", "routing_settings", "preview_accuracy", "dtype", "budgets", "batch_size",
    "micro_batch_size", "prefill_chunk", "policy", "settings",
)  # fmt: skip
"""The order of axes: points differ in the last ones first."""

OPTIONS = {
    "settings": "--set",
    "routing_settings": "--routing-set",
    "machine_set": "--machine-set",
    "budgets": "--budget",
}
"""Options of the command line that are not named as their keywords."""

DEFAULTS: Axes = {"model": [MODEL], "workload": [WORKLOAD]}


class Sweep(msgspec.Struct, frozen=True):
    """A sweep as it was asked for.

    Attributes:
        prices: dollars per hour of a machine, by its name.
    """

    axes: Axes
    prices: dict[str, float] = {}


def read_sweep(path: Path) -> Sweep:
    """Read a sweep's file.

    Raises:
        BadInput: it cannot be read, has an unknown key or an empty axis, or a value is of another type.
    """
    where = str(path)
    tables = decode_toml(read_input(path, "sweep", MOST_BYTES), f"{where}: not a sweep")
    known = [*KINDS, *TABLES, PRICES]
    for name in tables:
        if name not in known:
            raise BadInput(f"{where}: unknown key {shown(name)}: {nearest(name, known)}")
    return _sweep_of(tables, lambda name: f"{where}: {name}")


def sweep_of_options(texts: Mapping[str, str], tables: Mapping[str, Iterable[str]]) -> Sweep:
    """The sweep that options of the command line ask for.

    Args:
        texts: values with commas between them, by keyword.
        tables: texts such as "ahead=1,2", by the name of the table.

    Raises:
        BadInput: as `read_sweep`.
    """
    given: dict[str, Any] = {name: _split(text, KINDS[name] is str) for name, text in texts.items()}
    for name, items in tables.items():
        table: dict[str, list[Any]] = {}
        for item in items:
            key, equals, values = item.partition("=")
            if not equals or not key.strip():
                raise BadInput(
                    f"{option_of(name)} {shown(item)}: write KEY=VALUE, or KEY=VALUE,VALUE for an axis"
                )
            if key.strip() in table:
                raise BadInput(
                    f"{option_of(name)} gives {key.strip()} twice: give it once, with commas between values"
                )
            table[key.strip()] = _split(values, TABLES.get(name) is str)
        if table:
            given[name] = {key: values[0] for key, values in table.items()} if name == PRICES else table
    return _sweep_of(given, option_of)


def merged(file: Sweep, options: Sweep) -> Sweep:
    """A sweep whose options replace the file's axes of the same names; defaults are added.

    Raises:
        BadInput: no machine or no policy is given.
    """
    axes = DEFAULTS | file.axes | options.axes
    for name, example in (("machine", "t4,l4"), ("policy", "all")):
        if name not in axes:
            raise BadInput(
                f"no {name} is given: add --{name}, such as --{name} {example}, or {name} = [...] in a file"
            )
    ordered = sorted(axes, key=lambda name: ORDER.index(name.partition(".")[0]))
    return Sweep({name: axes[name] for name in ordered}, file.prices | options.prices)


def option_of(name: str) -> str:
    """The option of the command line for a keyword, a table, or an axis of a table."""
    table, dot, key = name.partition(".")
    option = OPTIONS.get(table, f"--{table.replace('_', '-')}")
    return f"{option} {key}" if dot else option


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is most like another, as a question; all of them if none is like it."""
    keys = list(known)
    if not keys:
        return "they take none"
    near = nearest_of(name, keys)
    return f"did you mean {near}?" if near else f"use one of {', '.join(keys)}"


def _sweep_of(given: Mapping[str, Any], title: Callable[[str], str]) -> Sweep:
    """Convert values to lists of their types; `title` names a key in messages."""
    axes: Axes = {}
    for name, value in given.items():
        if name in KINDS:
            axes[name] = _values(value, KINDS[name], title(name))
        elif not isinstance(value, dict) or not value:
            raise BadInput(f"{title(name)} is {shown(value)}: give a table of keys and values")
        elif name in TABLES:
            for key, each in value.items():
                axes[f"{name}.{key}"] = _values(each, TABLES[name], title(f"{name}.{key}"))
    prices = {
        machine: _value(price, Price, title(f"{PRICES}.{machine}"))
        for machine, price in given.get(PRICES, {}).items()
    }
    return Sweep(axes, prices)


def _values(given: Any, kind: Any, title: str) -> list[Any]:
    listed = given if isinstance(given, list) else [given]
    if not listed:
        raise BadInput(f"{title} is empty: give at least one value, or omit it")
    unlike = {(type(value), value): value for value in (_value(each, kind, title) for each in listed)}
    return list(unlike.values())


def _value(given: Any, kind: Any, title: str) -> Any:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError:
        raise BadInput(f"{title}: {shown(given)} is not {_MEANT[kind]}: write it so, or omit it") from None


def _split(text: str, plain: bool) -> list[Any]:
    """The values between commas; numbers and truth values are converted unless the option takes text."""
    items = [item.strip() for item in text.split(",")]
    return items if plain else [parse_value(item) for item in items]

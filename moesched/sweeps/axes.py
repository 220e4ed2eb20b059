"""Axes of a sweep: the values of each option of `simulate_model`, from a TOML file and from the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from moesched.errors import BadInput
from moesched.inputs.defaults import WORKLOAD
from moesched.jobs.options import ScenarioOptions
from moesched.machines.toml_library import MOST_BYTES, Price
from moesched.options import Described, described
from moesched.settings import parse_value
from moesched.system.decoding import decode_toml
from moesched.system.input_file import read_input
from moesched.system.near_names import nearest_of
from moesched.system.plain_text import is_utf8, shown

MODEL = "mixtral-8x7b"
"""The model where none is given."""

Axes = dict[str, list[Any]]
"""The values of each axis, by name: a keyword of `simulate_model`, or, for one that is a table, keyword.key, such as
"settings.ahead".
"""

OPTIONS = described(ScenarioOptions)
"""The options that may be axes, in the order of loops over points: the last axis varies fastest."""

PRICES = "price"
"""Name of a table beside the axes: dollars per hour of each machine."""

_MEANT = {
    bool: "true or false",
    float: "a number",
    int: "a whole number",
    int | str: "a number of bytes, or text such as 600MB",
    str: "text",
    Any: "a number, true or false, or text",
}
"""The values of each type, in words."""

DEFAULTS: Axes = {"model": [MODEL], "workload": [WORKLOAD]}


class Sweep(msgspec.Struct, frozen=True):
    """The axes of a sweep and the prices of machines, as the user gave them.

    Attributes:
        axes: values of each axis, by name.
        prices: dollars per hour, by name of a machine.
    """

    axes: Axes
    prices: dict[str, float] = {}


def read_sweep(path: Path) -> Sweep:
    """Read a sweep's file.

    Raises:
        BadInput: the file cannot be read, has an unknown key or an empty axis, or a value is of another type.
    """
    where = str(path)
    tables = decode_toml(read_input(path, "sweep", MOST_BYTES), f"{where}: not a sweep")
    known = [*OPTIONS, PRICES]
    for name in tables:
        if name not in known:
            raise BadInput(f"{where}: unknown key {shown(name)}: {nearest(name, known)}")
    return _sweep_of(tables, lambda name: f"{where}: {name}")


def sweep_of_options(texts: Mapping[str, Iterable[str]]) -> Sweep:
    """Make a sweep from the options of the command line.

    Args:
        texts: arguments of each option, by the option's keyword. An argument is a list of values with commas, such as
            "1,2". For an option with keys, such as `settings`, it is a key with its values, such as "ahead=1,2".

    Raises:
        BadInput: an option has an empty or impossible value, or a key is missing or given twice.
    """
    given: dict[str, Any] = {}
    for name, items in texts.items():
        _require_utf8(name, items)
        if name != PRICES and not OPTIONS[name].is_table:
            given[name] = _split(name, ",".join(items), OPTIONS[name].item_kind is str)
            continue
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
            plain = name != PRICES and OPTIONS[name].item_kind is str
            table[key.strip()] = _split(f"{name}.{key.strip()}", values, plain)
        given[name] = table
        if name == PRICES:
            given[name] = {key: values[0] if len(values) == 1 else values for key, values in table.items()}
    return _sweep_of(given, option_of)


def merged(file: Sweep, options: Sweep) -> Sweep:
    """Join the sweep of a file with the sweep of the command line.

    An axis in `options` replaces the file's axis of the same name, and a price in `options` replaces the file's price
    of the same machine. If neither sweep gives a model or a workload, the result has the default one.

    Raises:
        BadInput: no machine or no policy is given.
    """
    axes = DEFAULTS | file.axes | options.axes
    for name, example in (("machine", "t4,l4"), ("policy", "all")):
        if name not in axes:
            raise BadInput(
                f"no {name} is given: add --{name}, such as --{name} {example}, or {name} = [...] in a file"
            )
    order = list(OPTIONS)
    ordered = sorted(axes, key=lambda name: order.index(name.partition(".")[0]))
    return Sweep({name: axes[name] for name in ordered}, file.prices | options.prices)


def option_of(name: str) -> str:
    """Return the command-line option for an axis or a table, such as --set ahead for the axis settings.ahead."""
    table, dot, key = name.partition(".")
    option = OPTIONS[table].flag if table in OPTIONS else f"--{table}"
    return f"{option} {key}" if dot else option


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name.

    This is a question with the most similar known name or, if none is similar, a list of all known names.
    """
    keys = list(known)
    if not keys:
        return "they take none"
    near = nearest_of(name, keys)
    return f"did you mean {near}?" if near else f"use one of {', '.join(keys)}"


def _sweep_of(given: Mapping[str, Any], title: Callable[[str], str]) -> Sweep:
    """Make a sweep from values by the name of their option; a single value becomes a list of one.

    Args:
        given: a value or a list for each option; for a table, a mapping of keys to values or lists.
        title: takes the name of an option, or "option.key", and returns the words for it in error messages.

    Raises:
        BadInput: an axis or table is empty, or a value is of another type or out of bounds.
    """
    axes: Axes = {}
    prices: dict[str, float] = {}
    for name, value in given.items():
        if name != PRICES and not OPTIONS[name].is_table:
            axes[name] = _values(value, OPTIONS[name], title(name))
        elif not isinstance(value, dict) or not value:
            raise BadInput(f"{title(name)} is {shown(value)}: give a table of keys and values")
        elif name == PRICES:
            prices = {machine: _price(each, title(f"{PRICES}.{machine}")) for machine, each in value.items()}
        else:
            for key, each in value.items():
                axes[f"{name}.{key}"] = _values(each, OPTIONS[name], title(f"{name}.{key}"))
    return Sweep(axes, prices)


def _values(given: Any, option: Described, title: str) -> list[Any]:
    listed = given if isinstance(given, list) else [given]
    if not listed:
        raise BadInput(f"{title} is empty: give at least one value, or omit it")
    unlike = {(type(value), value): value for value in (_value(each, option, title) for each in listed)}
    return list(unlike.values())


def _value(given: Any, option: Described, title: str) -> Any:
    kind = option.item_kind
    try:
        value = msgspec.convert(given, bool | int | float | str if kind is Any else kind)
    except msgspec.ValidationError:
        meant = "one of " + ", ".join(get_args(kind)) if get_origin(kind) is Literal else _MEANT[kind]
        raise BadInput(f"{title}: {shown(given)} is not {meant}: write it so, or omit it") from None
    if isinstance(value, float) and not isfinite(value):
        raise BadInput(f"{title} is {value}, which lines of results cannot hold: give a finite number")
    option.require(value, title)
    return value


def _price(given: Any, title: str) -> float:
    try:
        return msgspec.convert(given, Price)
    except msgspec.ValidationError:
        raise BadInput(
            f"{title}: {shown(given)} is not a number of dollars: write it so, or omit it"
        ) from None


def _require_utf8(name: str, items: Iterable[str]) -> None:
    for item in items:
        if not is_utf8(item):
            raise BadInput(f"{option_of(name)} {shown(item)} is not UTF-8, as results are: rename the file")


def _split(name: str, text: str, plain: bool) -> list[Any]:
    """Split a text at commas into values; numbers and truth values are converted unless `plain` is set.

    Args:
        name: the axis, for the error.
        plain: whether the values of the option are text, and stay as they are.

    Raises:
        BadInput: a value is empty, as in "1,,2" or "1,".
    """
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise BadInput(
            f"{option_of(name)} {shown(text)} has an empty value: write values with one comma between two"
        )
    return items if plain else [parse_value(item) for item in items]

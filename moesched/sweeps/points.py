"""Points of a sweep: all combinations of the values of its axes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from math import prod
from typing import Any

import msgspec

from moesched.errors import BadInput
from moesched.plugins import shipped_policies
from moesched.seams import Policy
from moesched.settings import setting_names, takes_setting
from moesched.sweeps.axes import OPTIONS, Axes, nearest, option_of

Inputs = dict[str, Any]
"""Keywords of `simulate_model`."""

ALL = "all"
"""Stands for all policies that ship."""

MOST_POINTS = 1_000_000


def policies_of(axes: Axes) -> list[str]:
    """Return the names of the policies of a sweep; "all" is replaced by the names of all shipped policies."""
    names = [name for each in axes["policy"] for name in (shipped_policies() if each == ALL else [each])]
    return list(dict.fromkeys(names))


def points_of(axes: Axes, policies: Mapping[str, type[Policy]]) -> list[Inputs]:
    """Return the inputs of all points of a sweep: one for each combination of the axes' values, without duplicates.

    A setting is given only to policies that take it.

    Args:
        policies: the classes of the sweep's policies, by name.

    Raises:
        BadInput: no policy takes a setting, or there are more than `MOST_POINTS` combinations.
    """
    known = list(dict.fromkeys(name for each in policies.values() for name in setting_names(each)))
    for name in axes:
        table, _, key = name.partition(".")
        if table == "settings" and key not in known:
            raise BadInput(
                f"{option_of(table)} {key}: none of the policies has this setting: {nearest(key, known)}"
            )
    axes = axes | {"policy": list(policies)}
    count = prod(map(len, axes.values()))
    if count > MOST_POINTS:
        raise BadInput(f"the axes have {count:,} combinations: name values for at most {MOST_POINTS:,}")
    points: dict[bytes, Inputs] = {}
    for values in product(*axes.values()):
        inputs = _inputs(dict(zip(axes, values, strict=True)), policies)
        points.setdefault(canonical(inputs), inputs)
    return list(points.values())


def canonical(inputs: Inputs) -> bytes:
    """Encode the inputs of a simulation as bytes that do not depend on the order of the keys."""
    return msgspec.json.encode(inputs, order="deterministic")


def axis_value(inputs: Inputs, axis: str) -> Any:
    """Return the value of an axis in a simulation; None if it has none, as its policy does not take the setting."""
    table, dot, key = axis.partition(".")
    return inputs.get(table, {}).get(key) if dot else inputs.get(table)


def _inputs(values: Mapping[str, Any], policies: Mapping[str, type[Policy]]) -> Inputs:
    inputs: Inputs = {}
    for name, value in values.items():
        table, _, key = name.partition(".")
        if not OPTIONS[table].is_table:
            inputs[name] = value
        elif table != "settings" or takes_setting(policies[values["policy"]], key):
            inputs.setdefault(table, {})[key] = value
    return inputs

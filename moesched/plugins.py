"""Policies, devices and transports by name: found through entry points, or named as `package.module:Class`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, overload

from moesched.errors import BadInput
from moesched.seams import Device, Policy, Transport
from moesched.system.memory import require_address_space
from moesched.system.signal_origin import came_from_a_signal

Kind = Literal["policies", "devices", "transports"]

_SINGULAR = {"policies": "policy", "devices": "device", "transports": "transport"}
_SEAMS: dict[Kind, type] = {"policies": Policy, "devices": Device, "transports": Transport}


def names(kind: Kind) -> list[str]:
    """The names of the installed plug-ins of one kind, sorted."""
    return sorted(point.name for point in _points(kind))


@overload
def find(kind: Literal["policies"], name: str) -> type[Policy]: ...


@overload
def find(kind: Literal["devices"], name: str) -> type[Device]: ...


@overload
def find(kind: Literal["transports"], name: str) -> type[Transport]: ...


def find(kind: Kind, name: str) -> type:
    """Find the class of that name, or at `package.module:Class`; the current folder is searched too.

    Raises:
        BadInput: there is none, it cannot be imported, or it lacks a method of its seam; the message says why.
    """
    if kind == "devices":
        require_address_space()
    cls = load(_target(kind, name), f"{_SINGULAR[kind]} {name!r}")
    seam = _SEAMS[kind]
    for method in (
        each for each, value in vars(seam).items() if callable(value) and not each.startswith("_")
    ):
        if not callable(getattr(cls, method, None)):
            raise BadInput(
                f"{name} is not a {_SINGULAR[kind]}: it has no {method}(); see moesched.seams.{seam.__name__}"
            )
    found: type = cls
    return found


def load(target: str, title: str) -> Any:
    """Import the object at `package.module:name`; the current folder is searched too.

    Args:
        title: names it in the error, such as "policy 'mine'".

    Raises:
        BadInput: it cannot be imported; the message says why.
    """
    module_name, _, attribute = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise BadInput(f"{title} cannot be loaded: {error}") from error
    except SystemExit as error:
        if came_from_a_signal(error):
            raise
        raise BadInput(f"{title} cannot be loaded: {module_name} raised {error!r}") from error


def make_policy(name: str, settings: dict[str, Any] | None = None) -> Policy:
    """Make a policy by its name and settings.

    Raises:
        BadInput: it does not exist, or does not take one of the settings.
    """
    make: Callable[..., Policy] = find("policies", name)
    try:
        return make(**(settings or {}))
    except TypeError as error:
        raise BadInput(f"policy {name} does not take these settings: {error}") from None
    except SystemExit as error:
        if came_from_a_signal(error):
            raise
        raise BadInput(f"policy {name} cannot be made: it raised {error!r}") from error


def problem(kind: Kind, name: str) -> str | None:
    """The reason why a plug-in cannot be loaded; None where it can."""
    try:
        find(kind, name)
    except BadInput as error:
        return str(error)
    return None


def _points(kind: Kind) -> tuple[EntryPoint, ...]:
    return _points_on(tuple(sys.path), kind)


@cache
def _points_on(path: tuple[str, ...], kind: Kind) -> tuple[EntryPoint, ...]:
    """The plug-ins of the packages on `path`, cached: finding them opens a file for each package."""
    return tuple(entry_points(group=f"moesched.{kind}"))


def _target(kind: Kind, name: str) -> str:
    for point in _points(kind):
        if point.name == name:
            return point.value
    if ":" in name:
        return name
    raise BadInput(
        f"unknown {_SINGULAR[kind]} {name!r}: choose {', '.join(names(kind))}, or write package.module:Class"
    )

"""Policies, devices and transports by name: found through entry points, or named as `package.module:Class`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal, overload

from moesched.errors import BadInput
from moesched.seams import Device, Policy, Transport
from moesched.system.memory import require_address_space
from moesched.system.plain_text import shown
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
    """Find the class of that name, or at `package.module:Class`, which is also searched in the current folder.

    Raises:
        BadInput: there is none, it cannot be imported, or it lacks a method of its seam; the message says why.
    """
    if kind == "devices":
        require_address_space()
    target, named = _target(kind, name)
    cls = load(target, f"{_SINGULAR[kind]} {shown(name)}", here=not named)
    seam = _SEAMS[kind]
    if not isinstance(cls, type):
        raise BadInput(f"{name} is not a {_SINGULAR[kind]}: it is {shown(cls)}, and should be a class")
    for method in (
        each for each, value in vars(seam).items() if callable(value) and not each.startswith("_")
    ):
        if not callable(getattr(cls, method, None)):
            raise BadInput(
                f"{name} is not a {_SINGULAR[kind]}: it has no {method}(); see moesched.seams.{seam.__name__}"
            )
    return cls


def load(target: str, title: str, *, here: bool = True) -> Any:
    """Import the object at `package.module:name`.

    Args:
        title: names it in the error, such as "policy 'mine'".
        here: whether to search the current folder too, after all other places.

    Raises:
        BadInput: it cannot be imported; the message says why.
    """
    module_name, _, attribute = target.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise BadInput(f"{title} is not the name of a class: write package.module:Class")
    if here:
        _search_here_last()
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (Exception, SystemExit) as error:  # a module may raise anything
        if isinstance(error, SystemExit) and came_from_a_signal(error):
            raise
        plain = isinstance(error, ImportError | AttributeError | SyntaxError)
        what = str(error) if plain else f"{module_name} raised {error!r}"
        raise BadInput(f"{title} cannot be loaded: {what}") from error


def _search_here_last() -> None:
    """Add the current folder to the end of the search path, so that no module there replaces another one."""
    with suppress(OSError):  # the folder was removed
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.append(here)


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


def _target(kind: Kind, name: str) -> tuple[str, bool]:
    """The place of a plug-in, and whether that is an installed one."""
    for point in _points(kind):
        if point.name == name:
            return point.value, True
    if ":" in name:
        return name, False
    raise BadInput(
        f"unknown {_SINGULAR[kind]} {shown(name)}: choose {', '.join(names(kind))}, or write package.module:Class"
    )

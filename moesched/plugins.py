"""Policies, devices and transports by name: found through entry points, or named as `package.module:Class`."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal

from moesched.errors import BadInput

Kind = Literal["policies", "devices", "transports"]

_SINGULAR = {"policies": "policy", "devices": "device", "transports": "transport"}


def names(kind: Kind) -> list[str]:
    """The names of all that is installed of one kind."""
    return sorted(point.name for point in _points(kind))


def find(kind: Kind, name: str) -> Any:
    """The class of that name, or at `package.module:Class`; the current folder is searched too.

    Raises:
        BadInput: there is none, or it cannot be imported; the message says why.
    """
    point = next((point for point in _points(kind) if point.name == name), None)
    if point is not None:
        return _load(kind, name, point.value)
    if ":" in name:
        return _load(kind, name, name)
    raise BadInput(
        f"unknown {_SINGULAR[kind]} {name!r}: choose {', '.join(names(kind))}, or write package.module:Class"
    )


def make_policy(name: str, settings: dict[str, Any] | None = None) -> Any:
    """A policy of that name with its settings.

    Raises:
        BadInput: it does not exist, or does not take one of the settings.
    """
    cls = find("policies", name)
    try:
        return cls(**(settings or {}))
    except TypeError as error:
        raise BadInput(f"policy {name} does not take these settings: {error}") from None


def problem(kind: Kind, name: str) -> str | None:
    """Why a plug-in cannot be loaded; None where it can."""
    try:
        find(kind, name)
    except BadInput as error:
        return str(error)
    return None


def _points(kind: Kind) -> list[EntryPoint]:
    return list(entry_points(group=f"moesched.{kind}"))


def _load(kind: Kind, name: str, target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise BadInput(f"{_SINGULAR[kind]} {name!r} cannot be loaded: {error}") from error

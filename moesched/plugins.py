"""Plug-ins: classes such as policies and devices, found by an installed name, as module:Class or as file.py:Class."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeVar, cast, overload

from moesched.errors import BadInput
from moesched.seams import Admission, Device, Kernel, Policy, Transport
from moesched.system.input_file import is_file
from moesched.system.memory import require_address_space
from moesched.system.near_names import with_nearest
from moesched.system.plain_text import is_utf8, shown
from moesched.system.signal_origin import came_from_a_signal
from moesched.system.source_lines import raising_line

T = TypeVar("T")
Kind = Literal["policies", "devices", "transports", "kernels", "admissions"]

_SINGULAR: dict[Kind, str] = {
    "policies": "policy",
    "devices": "device",
    "transports": "transport",
    "kernels": "kernel",
    "admissions": "rule of admission",
}
_SEAMS: dict[Kind, type] = {
    "policies": Policy,
    "devices": Device,
    "transports": Transport,
    "kernels": Kernel,
    "admissions": Admission,
}


def names(kind: Kind) -> list[str]:
    """Return the names of the installed plug-ins of one kind, sorted; those for tests of the framework are left out."""
    return sorted(point.name for point in _points(kind) if not point.value.startswith("moesched.testing."))


def shipped_policies() -> list[str]:
    """Return the names of the policies that come with the framework, sorted."""
    return sorted(point.name for point in _points("policies") if point.value.startswith("moesched.policies."))


@overload
def find(kind: Literal["policies"], given: str | type) -> type[Policy]: ...


@overload
def find(kind: Literal["devices"], given: str | type) -> type[Device]: ...


@overload
def find(kind: Literal["transports"], given: str | type) -> type[Transport]: ...


@overload
def find(kind: Literal["kernels"], given: str | type) -> type[Kernel]: ...


@overload
def find(kind: Literal["admissions"], given: str | type) -> type[Admission]: ...


def find(kind: Kind, given: str | type) -> type:
    """Find the class of a plug-in, and check that it has the methods of its protocol in `moesched.seams`.

    Args:
        given: an installed name, `module:Class` (also in the current folder), `file.py:Class`, or the class itself.

    Raises:
        BadInput: there is no such class, it cannot be imported, or it lacks a method; the message says why.
    """
    if kind in ("devices", "kernels"):
        require_address_space()
    name, found = name_of(kind, given), given
    if isinstance(given, _FoundName):
        return given.cls
    if isinstance(given, str):
        target, named = _target(kind, given)
        found = load(target, f"{_SINGULAR[kind]} {shown(name)}", here=not named)
    seam = _SEAMS[kind]
    if not isinstance(found, type):
        raise BadInput(f"{name} is not a {_SINGULAR[kind]}: it is {shown(found)}, and should be a class")
    for method in (
        each for each, value in vars(seam).items() if callable(value) and not each.startswith("_")
    ):
        if not callable(getattr(found, method, None)):
            raise BadInput(
                f"{name} is not a {_SINGULAR[kind]}: it has no {method}(); see moesched.seams.{seam.__name__}"
            )
    return found


class _FoundName(str):
    """A plug-in's name, with the class that was found by it."""

    cls: type


def found_here(kind: Kind, given: T) -> T:
    """Return `given`; if it is a name with a module or a file in it, load the class now, and keep it with the name.

    The returned name then stands for this class even if the current folder changes. An installed name does not depend
    on the current folder: it is returned as it is, and its module is imported only when it is used.

    Raises:
        BadInput: `find` cannot find or load the plug-in.
    """
    if not isinstance(given, str) or ":" not in given:
        return given
    name = _FoundName(given)
    name.cls = find(kind, given)
    return cast(T, name)


def name_of(kind: Kind, given: object) -> str:
    """Return a plug-in's name: a given name itself; for a class or object its installed name or `module:Class`."""
    if isinstance(given, str):
        return str(given)
    cls = given if isinstance(given, type) else type(given)
    place = f"{cls.__module__}:{cls.__qualname__}"
    return next((point.name for point in _points(kind) if point.value == place), place)


def name_elsewhere(kind: Kind, given: object) -> str:
    """Return the name by which other processes find a plug-in that was given by its name, as a class or as an object.

    Raises:
        BadInput: other processes cannot import the plug-in's class.
    """
    name = name_of(kind, given)
    if isinstance(given, str):
        return name
    if isinstance(given, type) and given.__module__ != "__main__" and "." not in given.__qualname__:
        return name
    raise BadInput(
        f"{_SINGULAR[kind]} {name} belongs to this program, and other processes cannot import it: put the class into a "
        "module, and give that class"
    )


def load(target: str, title: str, *, here: bool = True) -> Any:
    """Import and return an object.

    Args:
        target: the object's place: `package.module:name` or, with `here`, also `file.py:name`.
        title: the object's name in the error, such as "policy 'mine'".
        here: whether to search the current folder too, after all other places.

    Raises:
        BadInput: the object cannot be imported; the message says why.
    """
    module_name, _, attribute = target.rpartition(":")
    by_file = here and module_name.endswith(".py")
    names = [attribute] if by_file else [*module_name.split("."), attribute]
    if not all(name.isidentifier() for name in names):
        raise BadInput(f"{title} is not the name of a class: write module:Class or file.py:Class")
    if here:
        _search_here_last()
    try:
        module = _module_in(Path(module_name)) if by_file else importlib.import_module(module_name)
        return _named(module, module_name, attribute)
    except (Exception, SystemExit) as error:  # a module may raise anything
        if isinstance(error, SystemExit) and came_from_a_signal(error):
            raise
        place = f" ({line})" if (line := _line_of(error)) else ""
        raise BadInput(f"{title} cannot be loaded{place}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """Return the reason of a failed import in words, with the error's class if the text alone would not explain it."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}"
    plain = isinstance(error, ImportError | AttributeError)
    return str(error) if plain else f"{type(error).__name__}: {error}"


def _named(module: ModuleType, title: str, attribute: str) -> Any:
    """Return an attribute of a module.

    title: the module's name in the message.

    Raises:
        AttributeError: the module has no such attribute; the message names the classes that the module defines.
    """
    if hasattr(module, attribute):
        return getattr(module, attribute)
    own = [
        name
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    raise AttributeError(f"{title} has no {attribute}" + (f", only {', '.join(own)}" if own else ""))


def _module_in(file: Path) -> ModuleType:
    """Import the module in a file, and append the file's folder to `sys.path` for the modules that it imports."""
    path = file.expanduser().resolve(strict=True)
    if not is_utf8(str(path)):
        raise ImportError("its path is not UTF-8, as traces and reports are: rename its file or folder")
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path):
            return module
    name = path.stem if path.stem not in sys.modules else str(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "its name ends with .py"
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _line_of(error: BaseException) -> str:
    """Return the line of a plug-in's module that made its import fail, as file:line; empty if none of its lines did."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    return raising_line(error)


def _search_here_last() -> None:
    """Add the current folder to the end of `sys.path`, where none of its files replaces an installed module."""
    with suppress(OSError):  # the folder was removed
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.append(here)


def make_policy(name: str, settings: dict[str, Any] | None = None) -> Policy:
    """Make a policy by its name and settings.

    Raises:
        BadInput: the policy does not exist, or does not take one of the settings.
        Exception: an error of the policy's constructor.
    """
    make: Callable[..., Policy] = find("policies", name)
    try:
        return make(**(settings or {}))
    except TypeError as error:
        if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
            raise  # within the constructor
        raise BadInput(f"policy {name} does not take these settings: {error}") from None
    except SystemExit as error:
        if came_from_a_signal(error):
            raise
        raise BadInput(f"policy {name} cannot be made: it raised {error!r}") from error


def problem(kind: Kind, name: str) -> str | None:
    """Return the reason why the plug-in `name` cannot be loaded; None if it can."""
    try:
        find(kind, name)
    except BadInput as error:
        return str(error)
    return None


def _points(kind: Kind) -> tuple[EntryPoint, ...]:
    return _points_on(tuple(sys.path), kind)


@cache
def _points_on(path: tuple[str, ...], kind: Kind) -> tuple[EntryPoint, ...]:
    """Return the entry points of a kind in the packages on `path`; cached, as each search reads a file per package.

    path: `sys.path` at the time of the call.
    """
    return tuple(entry_points(group=f"moesched.{kind}"))


def _target(kind: Kind, name: str) -> tuple[str, bool]:
    """Return the place of a plug-in, as `module:Class` or `file.py:Class`, and whether `name` is an installed name.

    Raises:
        BadInput: there is no such plug-in, or the name is a file's, without a class.
    """
    for point in _points(kind):
        if point.name == name:
            return point.value, True
    if ":" in name:
        return name, False
    file = name if name.endswith(".py") else f"{name}.py"
    if is_file(Path(file)):
        raise BadInput(f"{_SINGULAR[kind]} {shown(name)} names a file and no class: write {file}:CLASS")
    known = names(kind)
    remedy = f"choose {', '.join(known)}, or write module:Class or file.py:Class"
    raise BadInput(f"unknown {_SINGULAR[kind]} {shown(name)}: {with_nearest(name, known, remedy)}")

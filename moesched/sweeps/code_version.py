"""Versions of the code that simulates, by which a sweep recognises results of older code."""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import version
from importlib.util import resolve_name
from pathlib import Path

from moesched.errors import BadInput
from moesched.seams import Policy

APART = ("cli", "devices", "policies", "transports")
"""Folders whose code does not count here. Simulations run none of it but policies, which count by `policy_version`."""

LIBRARIES = ("highspy", "numpy")
"""Libraries that compute figures of simulations, so that their versions count."""

_DIGITS = 16


@cache
def code_version() -> str:
    """Return the versions of this package and of `LIBRARIES`, and a hash of the sources, as text."""
    root = Path(__file__).parents[1]
    files = (path for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in APART)
    versions = [f"{name} {version(name)}" for name in ("moesched", *LIBRARIES)]
    return ", ".join([*versions, f"sources {_hash_of(files, root)}"])


def policy_version(policy: type[Policy]) -> str:
    """Return a hash of the policy's file and of the files in the same folder that it imports, also indirectly.

    The result is empty if the policy's class is not from a Python file.

    Raises:
        BadInput: a file cannot be read.
    """
    file = _file_of(policy.__module__)
    if file is None:
        return ""
    found: dict[Path, None] = {}
    _collect(policy.__module__, file.parent, found)
    return _hash_of(found, file.parent)


def _collect(module: str, folder: Path, found: dict[Path, None]) -> None:
    """Add a module's file to `found`, and the files of the modules that it imports, if they are in the folder."""
    file = _file_of(module)
    if file is None or file in found or not file.is_relative_to(folder):
        return
    found[file] = None
    for name in _imported(file, sys.modules[module].__package__ or ""):
        _collect(name, folder, found)


def _imported(file: Path, package: str) -> Iterator[str]:
    """Yield the full name of each module that a Python file may import.

    For `from a import b` this yields "a" and "a.b", although b may be a function or a class.

    Args:
        package: the file's package, from which relative imports start; empty for none.
    """
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            name = "." * node.level + (node.module or "")
            try:
                base = resolve_name(name, package) if node.level else name
            except ImportError:
                continue  # beyond the file's packages, as in `try: from . import x`, where it imports nothing
            yield base
            yield from (f"{base}.{each.name}" for each in node.names)


def _file_of(module: str) -> Path | None:
    loaded = sys.modules.get(module)
    file = None if loaded is None else vars(loaded).get("__file__")  # modules in C have none
    return Path(file).resolve() if file and file.endswith(".py") else None


def _hash_of(files: Iterable[Path], root: Path) -> str:
    digest = hashlib.sha256()
    try:
        for file in sorted(files):
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    except OSError as error:
        raise BadInput(f"cannot read {error.filename}: {error.strerror}: check its permissions") from error
    return digest.hexdigest()[:_DIGITS]

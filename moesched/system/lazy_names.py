"""Lazy import of a package's public names at their first use; the package's stub, `__init__.pyi`, lists the names."""

from __future__ import annotations

import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

IMPORT = re.compile(r"^from (\S+) import (?:\(([^)]*)\)|(.*))$", re.MULTILINE)
NAME = re.compile(r"(\w+) as (\w+)")


@cache
def homes_of(package: str) -> dict[str, tuple[str, str]]:
    """Return, for each public name of a package, the module that defines the object, and the object's name there."""
    stub = Path(str(sys.modules[package].__file__)).with_suffix(".pyi").read_text(encoding="utf-8")
    return {
        name: (module, original)
        for module, lines, line in IMPORT.findall(stub)
        for original, name in NAME.findall(lines or line)
    }


def load(package: str, name: str) -> Any:
    """Import and return the object of a package's public name; for "__all__", return the sorted list of names.

    Raises:
        AttributeError: the package has no such name.
    """
    homes = homes_of(package)
    if name == "__all__":
        return sorted(homes)
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    module, original = homes[name]
    value = getattr(import_module(module), original)
    setattr(sys.modules[package], name, value)
    return value

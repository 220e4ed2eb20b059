"""Predicted times of the shipped policies in a cell (model, machine, batch size), cached while the code is the same."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import msgspec

from moesched.errors import BadInput
from moesched.machines.profiles import machine_names
from moesched.models.shapes import SHAPES
from moesched.plugins import shipped_policies
from moesched.system.cache import cache_folder
from moesched.system.decoding import decode_json
from moesched.system.input_file import read_input
from moesched.system.whole_file import whole_file
from moesched.testing.grid.cells import Cell, simulate_cell

MOST_BYTES = 1_000_000
"""Largest number of bytes that the cache file may have."""


class _Kept(msgspec.Struct):
    """The content of the cache file.

    Attributes:
        code: hash of the code with which the times were predicted.
        cells: predicted seconds, by the cell's name, then by the name of each policy that fits in the cell.
    """

    code: str
    cells: dict[str, dict[str, float]]


def rivals_in(cell: Cell) -> dict[str, float]:
    """Return the predicted seconds of each shipped policy that fits in a cell, by name.

    Times are cached for models and machines known by name; not for models and machines in files, which may change.
    """
    if cell.model not in SHAPES or cell.machine not in machine_names():
        return _seconds_in(cell)
    kept = _read()
    if cell.name not in kept.cells:
        kept.cells[cell.name] = _seconds_in(cell)
        _write(kept)
    return kept.cells[cell.name]


def _seconds_in(cell: Cell) -> dict[str, float]:
    seconds = {}
    for name in shipped_policies():
        with suppress(BadInput):
            seconds[name] = simulate_cell(cell, name, {}).seconds
    return seconds


def _read() -> _Kept:
    code = _hash_of_code()
    with suppress(BadInput):
        kept = decode_json(read_input(_file(), "cache", MOST_BYTES), _Kept, str(_file()), "remove it")
        if kept.code == code:
            return kept
    return _Kept(code, {})


def _write(kept: _Kept) -> None:
    """Write the cached times; errors are ignored, since times can be predicted again."""
    with suppress(OSError, BadInput):
        _file().parent.mkdir(parents=True, exist_ok=True)
        with whole_file(_file(), "times of policies") as file:
            file.write(msgspec.json.encode(kept))


def _file() -> Path:
    return cache_folder() / "shipped-policies.json"


@cache
def _hash_of_code() -> str:
    """Return a hash of all modules and profiles of the framework, and of the policies that ship."""
    digest = hashlib.sha256()
    for package in ("moesched", "moesched.policies"):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations if spec is not None else None) or ():
            for file in sorted(Path(folder).rglob("*")):
                if file.suffix in (".py", ".toml"):
                    digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()

"""Reads profiles in TOML: shipped files by name, other files by path."""

from __future__ import annotations

import re
from importlib import resources
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from moesched.errors import BadInput
from moesched.system.decoding import decode_toml, fault
from moesched.system.input_file import read_input
from moesched.system.near_names import with_nearest
from moesched.system.plain_text import shown

T = TypeVar("T")

_UNKNOWN = re.compile("Object contains unknown field `(.*)`")

MOST_BYTES = 1_000_000
"""Largest number of bytes of a profile; a calibrated machine's has about 100 kB."""

# Limits that no real figure reaches, so that times and sizes made from them are finite.
MOST_RATE = 1e30
Rate = Annotated[float, Meta(ge=1, lt=MOST_RATE)]
"""A rate: operations or bytes per second."""
Seconds = Annotated[float, Meta(ge=0, lt=1e9)]
Amount = Annotated[float, Meta(ge=0, lt=1e30)]
"""An amount: bytes, FLOPs or rows."""
Price = Annotated[float, Meta(ge=0, lt=1e12)]


def profile_names(package: str) -> list[str]:
    """Return the names of the profiles that ship in a package.

    Args:
        package: name of the Python package that holds the files.
    """
    folder = resources.files(package)
    return sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def profile_text(package: str, kind: str, name_or_file: str) -> bytes:
    """Return the bytes of a shipped profile, or of a file.

    Args:
        package: name of the Python package that holds the shipped profiles.
        kind: name for such profiles, such as "machine", for the error message.

    Raises:
        BadInput: there is no such profile or file, or the file cannot be read.
    """
    names = profile_names(package)
    if not isinstance(name_or_file, str | PathLike):
        raise BadInput(f"no {kind} {shown(name_or_file)}: name a TOML file or one of {', '.join(names)}")
    name_or_file = fspath(name_or_file)
    if name_or_file in names:
        return (resources.files(package) / f"{name_or_file}.toml").read_bytes()
    try:
        return read_input(Path(name_or_file), kind, MOST_BYTES)
    except BadInput as error:
        if not name_or_file or isinstance(error.__cause__, FileNotFoundError):
            remedy = with_nearest(name_or_file, names, f"name a TOML file or one of {', '.join(names)}")
            raise BadInput(f"no {kind} {name_or_file!r}: {remedy}") from None
        raise


def decode_profile(text: bytes, kind: str, where: str) -> dict[str, Any]:
    """Return the tables of a TOML text as dicts.

    Args:
        kind: name for such profiles, such as "machine", for the error message.
        where: name of the file, for the error message.

    Raises:
        BadInput: the text is not TOML.
    """
    return decode_toml(text, f"{where}: not a {kind}")


def convert_profile(raw: Any, kind: type[T], key: str, where: str) -> T:
    """Convert a value that was read from a profile to type `kind`, and check it.

    Args:
        raw: the value, as dicts, lists, numbers and texts.
        key: key of the value in the profile; empty for the whole profile.
        where: name of the file.

    Raises:
        BadInput: a figure is missing or impossible; the message names `where` and the whole key.
    """
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        message, path = fault(error, raw)
        unknown = _UNKNOWN.fullmatch(message)
        if unknown and not path and issubclass(kind, msgspec.Struct):
            keys = [each.encode_name for each in msgspec.structs.fields(kind)]
            message += ": " + with_nearest(unknown[1], keys, f"keys are {', '.join(keys)}")
        at = (key + path).lstrip(".")
        raise BadInput(f"{where}: {at}: {message}" if at else f"{where}: {message}") from None

"""Profiles: TOML files, found by name if they ship, or by path."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from moesched.errors import BadInput

T = TypeVar("T")

ABSURD = 1e30  # stands for infinity, which TOML allows but msgspec has no limit for
Positive = Annotated[float, Meta(gt=0, lt=ABSURD)]
NotNegative = Annotated[float, Meta(ge=0, lt=ABSURD)]


def profile_names(package: str) -> list[str]:
    """The names of the profiles that ship in a package."""
    folder = resources.files(package)
    return sorted(
        entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")
    )


def profile_text(package: str, kind: str, name_or_file: str) -> bytes:
    """The text of a shipped profile, or of a file.

    Args:
        kind: the kind of profile, for messages.

    Raises:
        BadInput: neither exists, or the file cannot be read.
    """
    names = profile_names(package)
    if name_or_file in names:
        return (resources.files(package) / f"{name_or_file}.toml").read_bytes()
    path = Path(name_or_file)
    if not path.is_file():
        raise BadInput(f"no {kind} {name_or_file!r}: name a TOML file or one of {', '.join(names)}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadInput(f"cannot read {kind} {path}: {error.strerror}: check its permissions") from error


def decode_profile(text: bytes, kind: str, where: str) -> dict[str, Any]:
    """The tables of a TOML text.

    Raises:
        BadInput: it is not TOML; the message names `where`.
    """
    try:
        decoded: dict[str, Any] = msgspec.toml.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{where}: not a {kind}: {error}") from None
    return decoded


def convert_profile(raw: Any, kind: type[T], key: str, where: str) -> T:
    """The value at `key`. Error messages name the whole key, which msgspec omits within tables.

    Raises:
        BadInput: a figure is missing or impossible; the message names `where` and the key.
    """
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        at = (key + path.rstrip("`")).lstrip(".")
        raise BadInput(f"{where}: {at}: {message}" if at else f"{where}: {message}") from None

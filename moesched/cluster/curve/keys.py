"""CURVE keys, which identify nodes. The secret key is in a file that only its owner may read."""

from __future__ import annotations

import os
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from moesched.errors import BadInput
from moesched.system.input_file import open_input

KEY_LENGTH = 40
"""Characters of a key as text (Z85: five characters for four bytes)."""

MOST_BYTES = 4096
"""Largest number of bytes that are read of a key file."""

PUBLIC_NAME, SECRET_NAME = "moesched.key", "moesched.secret"

_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_ONLY_THE_OWNERS = 0o600


class KeyPair(NamedTuple):
    """Public and secret key of a node, as text."""

    public: str
    secret: str


def make_keys() -> KeyPair:
    """Make a new pair of keys, from the system's random numbers."""
    import zmq

    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode(), secret.decode())


def default_folder() -> Path:
    """Return the default folder of this machine's keys."""
    return Path.home() / ".moesched"


def write_keys(folder: Path, keys: KeyPair | None = None) -> KeyPair:
    """Write a pair of keys to a folder, and return the pair.

    The public key goes to `moesched.key`, which all may read, and the secret key to `moesched.secret`, with mode 0600.

    Args:
        keys: the pair to write; by default a new one.

    Raises:
        BadInput: the folder holds keys already, or cannot be written to; nothing is left behind.
    """
    keys = keys or make_keys()
    try:
        with ExitStack() as undo:
            _make_folder(folder, undo)
            for name, text in ((SECRET_NAME, keys.secret), (PUBLIC_NAME, keys.public)):
                handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _mode(name))
                undo.callback((folder / name).unlink)
                with os.fdopen(handle, "w", encoding="ascii") as file:
                    file.write(text + "\n")
            undo.pop_all()
    except FileExistsError as error:
        raise BadInput(
            f"{error.filename} exists already, and may be in use: name another folder with --out"
        ) from None
    except OSError as error:
        raise BadInput(f"cannot write keys to {folder}: {error.strerror}: name another --out") from error
    return keys


def _make_folder(folder: Path, undo: ExitStack) -> None:
    """Make a folder and its parents; closing `undo` removes those that did not exist before."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for each in reversed(missing):
        undo.callback(each.rmdir)


def public_key(secret: str) -> str:
    """Return the public key that belongs to a secret key.

    Raises:
        BadInput: the text is not a key.
    """
    import zmq

    problem = key_problem(secret)
    if problem:
        raise BadInput(f"the secret key is not valid: {problem}: make one with `moesched keygen`")
    return zmq.curve_public(secret.encode()).decode()


def read_keys(secret_file: Path) -> KeyPair:
    """Read a secret key from a file; return the pair with the public key, which is computed from the secret one.

    Raises:
        BadInput: the file cannot be read, holds no key, or can be read by others than its owner.
    """
    with open_input(secret_file, "the secret key", remedy="make one with `moesched keygen`") as file:
        text = file.read(MOST_BYTES).decode("ascii", "replace").strip()
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    problem = key_problem(text)
    if problem:
        raise BadInput(f"{secret_file} holds no secret key: {problem}: make one with `moesched keygen`")
    if mode & ~_ONLY_THE_OWNERS:
        raise BadInput(f"{secret_file} has mode {mode:04o}: others may read the key: chmod 600 {secret_file}")
    return KeyPair(public_key(text), text)


def key_problem(text: str) -> str | None:
    """Describe why a text is no key; None if it is one."""
    if len(text) != KEY_LENGTH:
        return f"it has {len(text)} characters, a key has {KEY_LENGTH}"
    strange = next((letter for letter in text if letter not in _LETTERS), None)
    if strange is not None:
        return f"{strange!r} is not a character of a key"
    groups = (text[start : start + 5] for start in range(0, KEY_LENGTH, 5))
    beyond = next((group for group in groups if _number(group) >= 1 << 32), None)
    return None if beyond is None else f"{beyond!r} does not decode to four bytes"


def _number(letters: str) -> int:
    """Decode Z85 characters, most significant first, to a number."""
    number = 0
    for letter in letters:
        number = number * len(_LETTERS) + _LETTERS.index(letter)
    return number


def _mode(name: str) -> int:
    return _ONLY_THE_OWNERS if name == SECRET_NAME else 0o644

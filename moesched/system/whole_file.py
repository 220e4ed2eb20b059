"""Atomic writing of files: a file is complete, or is not there at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from moesched.errors import BadInput
from moesched.system.input_file import is_folder, is_pipe
from moesched.system.scratch import scratch_beside

_REMEDIES = {
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EEXIST: "a file is there: name another folder",
    errno.ENOENT: "make its folder first",
    errno.ENOTDIR: "a part of its path is a file: name another folder",
    errno.EISDIR: "it is a folder: name a file in it",
    errno.EACCES: "name a file in a folder that you may write to",
    errno.EPERM: "name a file in a folder that you may write to",
    errno.EROFS: "name a file on a disk that can be written to",
    errno.ENOSPC: "free some space, or name a file on another disk",
    errno.EDQUOT: "free some space, or name a file on another disk",
    errno.EFBIG: "raise the limit on file sizes, or name a file on another disk",
}


def path_refusal(error: OSError) -> str | None:
    """Return a line with the path, fault and remedy of an operating system's error; None if it is not about a path."""
    remedy = _REMEDIES.get(error.errno or 0)
    if remedy is None or error.filename is None:
        return None
    return f"{error.filename}: {error.strerror}: {remedy}"


@contextmanager
def whole_file(path: Path, what: str) -> Iterator[BinaryIO]:
    """Yield a temporary file beside `path`, opened for writing; at the context's end it replaces the file at `path`.

    Devices, pipes and other special files are written to directly.

    Args:
        what: kind of file, for the error message.

    Raises:
        BadInput: the file cannot be written; the temporary file is removed and an existing file is unchanged.
    """
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        target = Path(os.path.realpath(path))  # also of a link that leads to itself, which cannot be written
        with scratch_beside(target) as partial:
            with partial.open("xb") as file:
                yield file
            partial.replace(target)
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "name another file")
        raise BadInput(f"cannot write {what} {path}: {error.strerror or error}: {remedy}") from error


def write_json(path: Path, what: str, content: object) -> None:
    """Write a value as indented JSON, atomically.

    Args:
        what: kind of file, for the error message.

    Raises:
        BadInput: the file cannot be written; no part of it is left, and an existing file is unchanged.
    """
    with whole_file(path, what) as file:
        file.write(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def require_writable(path: Path | str | None, what: str) -> None:
    """Check that a file can be written, before a long run whose result goes there.

    Args:
        path: the file; None for no file.
        what: kind of file, for the error message.

    Raises:
        BadInput: the file cannot be written.
    """
    if path is None:
        return
    path = Path(path)
    if is_folder(path):
        raise BadInput(f"cannot write {what} {path}: it is a folder: name a file in it")
    if is_pipe(path):
        return  # a test would wait for its reader
    with suppress(_Abandoned), whole_file(path, what) as file:
        os.write(file.fileno(), b"")  # a device such as /dev/full refuses even this
        raise _Abandoned


class _Abandoned(Exception):
    """Raised to leave `whole_file` before the new file replaces the existing one."""

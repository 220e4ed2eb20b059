"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from moesched.errors import BadInput

_REMEDIES = {
    errno.ENOENT: "make its folder first",
    errno.ENOTDIR: "a part of its path is a file: name another place",
    errno.EISDIR: "it is a folder: name a file in it",
    errno.EACCES: "name a file in a folder that you may write to",
    errno.EPERM: "name a file in a folder that you may write to",
    errno.EROFS: "name a file on a disk that can be written to",
    errno.ENOSPC: "free some space, or name a file on another disk",
    errno.EDQUOT: "free some space, or name a file on another disk",
    errno.EFBIG: "raise the limit on file sizes, or name a file on another disk",
}


@contextmanager
def whole_file(path: Path, what: str) -> Iterator[BinaryIO]:
    """A file to write to, which appears under its name once it is complete; until then it lies beside it.

    What exists and is no ordinary file, such as a device or a pipe, is written to directly.

    Args:
        what: what is written, for the error's message.

    Raises:
        BadInput: the file cannot be written; nothing is left of it, and what was there before is unchanged.
    """
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        target = path.resolve()
        partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
        try:
            with partial.open("xb") as file:
                yield file
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "name another file")
        raise BadInput(f"cannot write {what} {path}: {error.strerror or error}: {remedy}") from error


def require_writable(path: Path | str | None, what: str) -> None:
    """Whether a file may be written, so that nobody learns it after a long run only.

    Raises:
        BadInput: it cannot be.
    """
    if path is None:
        return
    path = Path(path)
    if path.is_dir():
        raise BadInput(f"cannot write {what} {path}: it is a folder: name a file in it")
    if path.exists() and not path.is_file():
        return  # a pipe or a device: trying would write to it
    with suppress(_OnlyTried), whole_file(path, what):
        raise _OnlyTried


class _OnlyTried(Exception):
    """Leaves a file that is only tried before it appears."""

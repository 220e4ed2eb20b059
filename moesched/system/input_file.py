"""Safe reading of files that users give: of limited size, and no devices, since reading one may never end."""

from __future__ import annotations

import os
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from moesched.errors import BadInput
from moesched.system.plain_text import shown

WRITER_MILLISECONDS = 500
"""Milliseconds in which some process has to begin to write to a pipe."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
GIT_LFS = b"version https://git-lfs"
"""Beginning of the text that git-lfs leaves in the place of a large file."""

_PIECE = 1 << 20  # of a file that does not tell its size


def read_input(path: Path, what: str, most: int, *, remedy: str = "check its path and permissions") -> bytes:
    """Return all bytes of a file, or of a pipe to its end, without a byte order mark of UTF-8.

    Args:
        what: kind of file, for messages, such as "machine".
        most: the largest number of bytes that the file may have, above what any real file of this kind has.
        remedy: advice for a file that cannot be read.

    Raises:
        BadInput: the file cannot be read, is a folder or a device, or has more bytes.
    """
    with open_input(path, what, remedy=remedy, pipes=True) as file:
        pieces, left = [], most + 1
        at_once = max(os.fstat(file.fileno()).st_size + 1, _PIECE)
        while left and (piece := file.read(min(left, at_once))) != b"":
            if piece is None:  # the pipe has a writer, for whom to wait
                os.set_blocking(file.fileno(), True)
            else:
                pieces.append(piece)
                left -= len(piece)
    if not left:
        raise BadInput(
            f"{what} {path} has more than {most:,} bytes, which no real one has; name another file"
        )
    return b"".join(pieces).removeprefix(BYTE_ORDER_MARK)


def given_path(value: object, what: str) -> Path:
    """Return the path that a Python caller gives as a text or as a `Path`.

    Args:
        what: the thing whose path it is, for the message.

    Raises:
        BadInput: the value is not a path.
    """
    if not isinstance(value, str | os.PathLike):
        raise BadInput(f"the path of {what} is {shown(value)}: give a text or a Path")
    return Path(value)


def absolute_path(path: Path) -> Path:
    """Return the absolute path of a file or folder; a path that does not exist is returned as it is, for messages."""
    return path.absolute() if exists(path) else path


@contextmanager
def open_input(
    path: Path, what: str, *, remedy: str = "check its path and permissions", pipes: bool = False
) -> Iterator[FileIO]:
    """Open a regular file without a buffer; errors while the `with` block reads the file become BadInput, too.

    Args:
        what: kind of file, for messages.
        remedy: advice for a file that cannot be read.
        pipes: whether to accept a pipe; its reads return None while its writer has written nothing new.

    Raises:
        BadInput: the file cannot be read, or is no regular file.
    """
    try:
        with FileIO(path, "rb", opener=_without_waiting) as file:
            _require_readable(file.fileno(), path, what, pipes)
            yield file
    except IsADirectoryError as error:
        raise BadInput(f"cannot read {what} {path}: it is a folder, not a file; {remedy}") from error
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise BadInput(f"cannot read {what} {path}: {reason}; {remedy}") from error


def exists(path: Path) -> bool:
    """Test whether a path exists; False also for a text that cannot be a path."""
    return _mode(path) != 0


def is_file(path: Path) -> bool:
    """Test whether a path is a regular file; False also for a text that cannot be a path."""
    return stat.S_ISREG(_mode(path))


def is_folder(path: Path) -> bool:
    """Test whether a path is a folder; False also for a text that cannot be a path."""
    return stat.S_ISDIR(_mode(path))


def is_pipe(path: Path) -> bool:
    """Test whether a path is a pipe with a name (a FIFO); False also for a text that cannot be a path."""
    return stat.S_ISFIFO(_mode(path))


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except (OSError, ValueError):
        return 0


def _without_waiting(path: str, flags: int) -> int:
    """Open a file with flags of `os.open`, without waiting for a pipe's writer, and return its descriptor.

    The function serves as the `opener` of `FileIO`.
    """
    return os.open(path, flags | os.O_NONBLOCK)


def _require_readable(descriptor: int, path: Path, what: str, pipes: bool) -> None:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        if os.pread(descriptor, len(GIT_LFS), 0) == GIT_LFS:
            raise BadInput(
                f"{what} {path} is a pointer of git-lfs, not the file itself: run `git lfs pull` where it came from, "
                "or download it again"
            )
        return
    if not stat.S_ISFIFO(mode):
        raise BadInput(f"cannot read {what} {path}: it is a device; name a file")
    if not pipes:
        raise BadInput(f"cannot read {what} {path}: it is a pipe; write its content to a file")
    writer = select.poll()
    writer.register(descriptor, select.POLLIN)
    writer.poll(WRITER_MILLISECONDS)

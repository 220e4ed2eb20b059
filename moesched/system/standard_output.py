"""Reservation of standard output for a command's results.

Everything else that is printed, also by C libraries and children, goes to standard error.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from moesched.system.silence import STDERR, STDOUT

MOST_LINKS = 40
_FOLDER_OF_DESCRIPTORS = re.compile(r"/dev/fd|/proc/self(/task/\d+)?/fd")

_reserved: list[TextIO] = []
"""The stream of the command's results, once it is reserved."""


def reserve_stdout() -> Callable[[], None]:
    """Reserve standard output for `command_output`; return a function that undoes the reservation.

    All else that the process writes to standard output goes to standard error. A closed standard output stays closed.
    """
    if sys.stderr is None:  # it is closed; libraries write to it all the same
        _open_null(STDERR)
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # open to the end
    given = sys.stdout
    if given is None:
        return lambda: None
    given.flush()
    kept = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    buffering = 1 if os.isatty(kept) else -1
    out = open(kept, "w", buffering, given.encoding, given.errors)  # noqa: PTH123, SIM115  # a descriptor
    _reserved.append(out)
    sys.stdout = sys.stderr

    def release() -> None:
        ctypes.CDLL(None).fflush(None)  # what C libraries hold back goes to standard error, too
        with out:
            _reserved.remove(out)
            os.dup2(kept, STDOUT)
        sys.stdout = given

    return release


def command_output() -> TextIO:
    """Return the stream for a command's results.

    The stream writes to standard output even while `reserve_stdout` sends everything else to standard error.
    """
    return _reserved[-1] if _reserved else sys.stdout


def abandon(stream: TextIO) -> None:
    """Flush a stream if possible, and drop all later output, so that the interpreter's flush at its end cannot fail."""
    with suppress(OSError, ValueError):
        stream.flush()
    with suppress(OSError, ValueError):
        _open_null(stream.fileno())


def is_stdout(path: Path) -> bool:
    """Test whether a path stands for this process's standard output; False if standard output is /dev/null."""
    if str(path) == "-" or _descriptor(path) == STDOUT:
        return True
    try:
        here, there = path.stat(), os.fstat(command_output().fileno())
        return os.path.samestat(here, there) and not os.path.samestat(here, os.stat(os.devnull))  # noqa: PTH116
    except (OSError, ValueError):  # there is no such file, or the stream has no descriptor
        return False


def _descriptor(path: Path) -> int | None:
    """Return the file descriptor of this process that a path stands for, such as 1 for /dev/stdout; None if none."""
    for _ in range(MOST_LINKS):
        folder = os.path.realpath(path.parent)
        if path.name.isdecimal() and _FOLDER_OF_DESCRIPTORS.fullmatch(
            folder.replace(f"/{os.getpid()}/", "/self/")
        ):
            return int(path.name)
        path = Path(folder, path.name)
        if not path.is_symlink():
            return None
        path = path.parent / path.readlink()
    return None


def _open_null(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)

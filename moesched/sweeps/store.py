"""The file of a sweep's results: a line of JSON for each simulation; a sweep that ended early goes on from this file.

Each line is appended as soon as its simulation is done. If the last line is cut off, since the process was killed or
the disk became full, it is removed when the file is opened again. Only one process at a time can open the file.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from moesched.errors import BadInput
from moesched.sweeps.line import LINE_START, Line, parse_line
from moesched.sweeps.points import canonical
from moesched.system.signals import signals_held
from moesched.system.whole_file import require_writable, whole_file

MOST_BYTES = 64_000_000
"""Largest number of bytes of a line; the line of a run that generates a million tokens has 25 MB."""


class _Place(NamedTuple):
    """The position of a line in the file: its first byte, and its number of bytes."""

    start: int
    length: int


class Store:
    """A file of results, open and locked; a context manager, which closes the file.

    Attributes:
        path: path of the file.
        lines: the newest line of each simulation, by the line's key.

    Raises:
        BadInput: the file cannot be read or written, another sweep has locked it, or a line is not a sweep's result.
    """

    def __init__(self, path: Path) -> None:
        require_writable(path, "results")
        self.path = path
        self.lines: dict[str, Line] = {}
        self._places: dict[str, _Place] = {}
        self._of_inputs: dict[bytes, str] = {}
        self._superseded = False
        with _told(f"cannot open results {path}", "check its path and permissions"):
            self._descriptor = _open_locked(path)
        try:
            self._end = self._read()
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if self._superseded and kind is None:
                self._rewrite()
        finally:
            os.close(self._descriptor)

    def append(self, line: bytes) -> Line:
        """Append a line, which ends in a newline, to the file; returns the parsed line.

        In `lines` it replaces an earlier line with the same inputs.

        Raises:
            BadInput: the line cannot be written; the file is as before.
        """
        read = parse_line(line, str(self.path))
        remedy = "all finished ones are in it; free some space, and run the same command again to go on"
        with signals_held(), _told(f"cannot write results to {self.path}", remedy):
            try:
                _write(self._descriptor, line)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._descriptor, self._end)
                raise
        self._add(read, len(line))
        return read

    def whole_lines(self, keys: Iterable[str]) -> Iterator[bytes]:
        """Yield the lines with these keys, as they are in the file."""
        for key in keys:
            start, length = self._places[key]
            with self._reading():
                yield os.pread(self._descriptor, length, start)

    def _add(self, line: Line, length: int) -> None:
        inputs = canonical(line.inputs)
        before = self._of_inputs.pop(inputs, None)
        if before is not None:
            self._superseded = True
            self.lines.pop(before, None)  # keys that somebody wrote by hand may be of several inputs
        self.lines[line.key] = line
        self._places[line.key] = _Place(self._end, length)
        self._of_inputs[inputs] = line.key
        self._end += length

    def _read(self) -> int:
        """Read all lines, and cut off one that is not complete; returns the file's length in bytes."""
        self._end = 0
        with self._reading(), open(self._descriptor, "rb", closefd=False) as file:  # a descriptor
            for number in count(1):
                line = file.readline(MOST_BYTES + 1)
                if not line.endswith(b"\n") and len(line) <= MOST_BYTES and _is_torn(line):
                    os.ftruncate(self._descriptor, self._end)
                    break
                self._add(parse_line(line, f"{self.path}:{number}"), len(line))
        return self._end

    def _reading(self) -> AbstractContextManager[None]:
        return _told(f"cannot read results {self.path}", "check its disk, or name another file with --out")

    def _rewrite(self) -> None:
        """Rewrite the file with only the newest line for each combination of inputs."""
        with whole_file(self.path, "results") as file:
            for line in self.whole_lines(self.lines):
                file.write(line)


def _open_locked(path: Path) -> int:
    """Open a file of results and lock it; returns its descriptor.

    Raises:
        BadInput: another process has locked the file, or the path is no regular file.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise BadInput(f"cannot keep results in {path}: it is a pipe or a device: name a file")
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
            os.close(descriptor)  # another sweep has replaced it meanwhile
        except BlockingIOError:
            os.close(descriptor)
            raise BadInput(
                f"another sweep writes to {path}: wait until it ends, or name another file with --out"
            ) from None
        except BaseException:
            os.close(descriptor)
            raise


def _is_torn(line: bytes) -> bool:
    """Test whether a last line without a newline is the beginning of a result, rather than some other text."""
    return line.startswith(LINE_START) or LINE_START.startswith(line)


def _write(descriptor: int, line: bytes) -> None:
    left = memoryview(line)
    while left:
        left = left[os.write(descriptor, left) :]


@contextmanager
def _told(what: str, remedy: str) -> Iterator[None]:
    """Return a context that converts an OSError to a BadInput.

    Args:
        what: first part of the message: the operation that failed.
        remedy: last part of the message.
    """
    try:
        yield
    except OSError as error:
        raise BadInput(f"{what}: {error.strerror or error}: {remedy}") from error

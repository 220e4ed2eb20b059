"""Temporary files and folders. If a process is killed before it removes its own, the next start of moesched does so.

Each process lists its temporary paths in its ledger, a file in the cache folder, and keeps the ledger locked while it
lives. A ledger that is not locked belongs to a dead process: `sweep` removes the paths in it. A process that cannot
write to the cache folder keeps no ledger; its temporary files stay if it is killed.
"""

from __future__ import annotations

import fcntl
import os
import platform
import secrets
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moesched.system.cache import cache_folder
from moesched.system.input_file import is_folder

PREFIX = "moesched-"
PARTIAL = ".partial"
_LEDGERS = "scratch"
LONGEST_NAME = 50
"""Characters of a file's name that the name of its temporary file repeats; file systems limit names to 255 bytes."""


def new_scratch_folder(inside: Path | None = None) -> Path:
    """Create a temporary folder that only this user can read; the caller passes it to `remove` in the end.

    Args:
        inside: the folder in which to create it; None for the system's folder for temporary files.

    Raises:
        OSError: the folder cannot be created.
    """
    parent = Path(tempfile.gettempdir() if inside is None else inside).absolute()
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f"{PREFIX}{secrets.token_hex(8)}"
    _ledger.add(folder)
    folder.mkdir(mode=0o700)
    return folder


@contextmanager
def scratch_folder(inside: Path | None = None) -> Iterator[Path]:
    """Yield a new temporary folder, which is removed when the context ends.

    Args:
        inside: the folder in which to create it; None for the system's folder for temporary files.
    """
    folder = new_scratch_folder(inside)
    try:
        yield folder
    finally:
        remove(folder)


@contextmanager
def scratch_beside(target: Path) -> Iterator[Path]:
    """Yield a path beside `target` at which nothing exists, for a file or folder that the caller renames to `target`.

    Whatever is still at this path when the context ends is removed.
    """
    name = target.name[:LONGEST_NAME]
    path = target.absolute().with_name(f".{name}.{secrets.token_hex(4)}{PARTIAL}")
    _ledger.add(path)
    try:
        yield path
    finally:
        remove(path)


def remove(path: Path) -> None:
    """Remove a file or folder that this module created; no error if it does not exist."""
    _remove(path)
    _ledger.drop(path)


def remove_all() -> None:
    """Remove all temporary files and folders of this process; for a process that is about to end without cleanup."""
    for path in _ledger.paths:
        _remove(path)
    _ledger.close()


def sweep() -> None:
    """Remove the temporary files and folders of dead processes on this machine."""
    for file in _ledger_folder().glob("[!.]*"):
        host, *_ = file.name.rsplit("-", 2)
        if host == platform.node():
            with suppress(OSError):
                _sweep(file)


def _sweep(file: Path) -> None:
    """Remove all paths that a ledger lists, and then the ledger.

    Args:
        file: the ledger.

    Raises:
        OSError: the ledger's process lives and holds the lock, or the ledger cannot be read.
    """
    with file.open("rb") as ledger:
        fcntl.flock(ledger, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A path that was cut off because the disk was full may lead to something else.
        whole, _, _ = ledger.read().rpartition(b"\0")
        for line in whole.split(b"\0"):
            path = Path(os.fsdecode(line))
            if path.is_absolute() and (path.name.startswith(PREFIX) or path.name.endswith(PARTIAL)):
                _remove(path)
        file.unlink()


def _remove(path: Path) -> None:
    if is_folder(path) and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def _ledger_folder() -> Path:
    return cache_folder() / _LEDGERS


class _Ledger:
    """The list of this process's temporary paths, also kept in a file that the process locks while it lives."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal may end the process while it is held
        self._paths: list[Path] = []
        self._file: Path | None = None
        self._descriptor = -1
        self._process = 0

    @property
    def paths(self) -> list[Path]:
        """A copy of the list of paths; empty in a forked process, since the paths belong to its parent."""
        return self._paths[:] if self._process == os.getpid() else []

    def add(self, path: Path) -> None:
        """Add a path to the list and to the ledger's file; to be called before the path is created."""
        with self._lock:
            if self._process != os.getpid():
                self._begin()
            self._paths.append(path)
            if self._descriptor >= 0:
                with suppress(OSError):  # the cache's disk is full
                    os.write(self._descriptor, os.fsencode(path) + b"\0")

    def drop(self, path: Path) -> None:
        """Strike a path off the ledger, without deleting it; delete the ledger's file if no path is left in it."""
        with self._lock:
            if path in self._paths:
                self._paths.remove(path)
            if not self._paths:
                self.close()

    def close(self) -> None:
        """Remove the ledger's file."""
        with self._lock:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor < 0 or self._process != os.getpid() or self._file is None:
                return
            self._process = 0
            self._file.unlink(missing_ok=True)
            os.close(descriptor)

    def _begin(self) -> None:
        """Create and lock the ledger's file, when this process, which may be a fork, adds its first path."""
        self._paths, self._descriptor, self._process = [], -1, os.getpid()
        name = f"{platform.node()}-{os.getpid()}-{secrets.token_hex(4)}"
        with suppress(OSError):
            _ledger_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
            unlocked = _ledger_folder() / f".{name}"
            descriptor = os.open(unlocked, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._file = unlocked.rename(_ledger_folder() / name)  # `sweep` sees it only now
            self._descriptor = descriptor


_ledger = _Ledger()

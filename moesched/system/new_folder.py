"""Atomic creation of a folder of files, or of one large file."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moesched.errors import BadInput
from moesched.system.input_file import exists, is_folder
from moesched.system.scratch import scratch_beside


@contextmanager
def new_folder(target: Path, needed: int, smaller: str) -> Iterator[Path]:
    """Yield a new folder to fill; it is renamed to `target` on exit, and removed if an error is raised.

    Args:
        needed: bytes that will be written.
        smaller: the remedy if the disk has too little space, such as "ask for fewer layers".

    Raises:
        BadInput: the target is in use or cannot be created, or the disk has too little space.
    """
    with _new_path(target, needed, smaller, _refuse_used) as partial:
        partial.mkdir()
        yield partial


@contextmanager
def new_file(target: Path, needed: int, smaller: str) -> Iterator[Path]:
    """Yield a path at which to make a file; it is renamed to `target` on exit, and removed if an error is raised.

    Arguments and errors are as for `new_folder`.
    """
    with _new_path(target, needed, smaller, _refuse_existing) as partial:
        yield partial


@contextmanager
def _new_path(target: Path, needed: int, smaller: str, refuse: Callable[[Path], object]) -> Iterator[Path]:
    """Yield a path at which to make a file or folder, and rename it to `target` on exit.

    refuse: called with `target`; raises `BadInput` if something there must not be replaced.
    """
    try:
        refuse(target)
        target = Path(os.path.realpath(target))  # if it is a link to an empty folder, that folder is replaced
        _require_space(target, needed, smaller)
        target.parent.mkdir(parents=True, exist_ok=True)
        with scratch_beside(target) as partial:
            yield partial
            partial.rename(target)
    except OSError as error:
        raise _cannot_write(target, error, smaller) from error


def write_at(descriptor: int, data: memoryview, offset: int) -> int:
    """Write all of the data to an open file, beginning at `offset` in bytes; return the number of bytes.

    Args:
        descriptor: the file's descriptor.
    """
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], offset + done)
    return done


def reserve(descriptor: int, nbytes: int) -> None:
    """Allocate `nbytes` bytes of disk for an open file, so that a full disk is noticed and the file is contiguous.

    Args:
        descriptor: the file's descriptor.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)


def _refuse_used(target: Path) -> None:
    if is_folder(target) and not any(target.iterdir()):
        if target.is_mount() or target.samefile(Path.cwd()):
            raise BadInput(
                f"{target} is a mount or the current folder, which no other replaces; name one in it"
            )
        return
    _refuse_existing(target)


def _refuse_existing(target: Path) -> None:
    if exists(target) or target.is_symlink():
        raise BadInput(f"{target} exists already; remove it or choose another name")


def _require_space(target: Path, needed: int, smaller: str) -> None:
    existing = next(parent for parent in target.absolute().parents if exists(parent))
    if not is_folder(existing):
        raise BadInput(
            f"{existing} is not a directory, so {target} cannot be created; choose another directory"
        )
    free = shutil.disk_usage(existing).free
    if free < needed:
        room = f"needs {needed:,} bytes and its disk has {free:,} free"
        raise BadInput(f"{target} {room}; make room or {smaller}")


def _cannot_write(target: Path, error: OSError, smaller: str) -> BadInput:
    if error.errno == errno.ENOSPC:
        return BadInput(f"the disk became full while writing {target}; make room or {smaller}")
    return BadInput(f"cannot write {target}: {error.strerror or error}; choose another directory")

"""Detects that a file in use was changed or replaced: by its size, its times and its number in the file system."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class FileIdentity(NamedTuple):
    """A file's number, size and times: a write, truncation or replacement of the file changes one of them.

    Times are as coarse as the system's clock tick: two writes within a few milliseconds may leave equal identities.

    Attributes:
        inode: number of the file in its file system.
        size: size of the file in bytes.
        modified: time of the last write, in ns; programs can set it back.
        changed: time of the last change of contents or attributes, in ns; programs cannot set it.
    """

    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """Return the identity of a file with this result of `os.stat`."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def difference(self, path: Path) -> str | None:
        """Return in words how the file at `path` differs from this identity; None if it is the same file, unchanged."""
        try:
            now = FileIdentity.of(path.stat())
        except OSError as error:
            return f"cannot be reached any more ({error.strerror})"
        if now == self:
            return None
        if now.inode != self.inode:
            return "was replaced by another file"
        if now.size != self.size:
            return f"was changed from {self.size:,} bytes to {now.size:,}"
        return "was written to" if now.modified != self.modified else "was changed"

"""Identity of files, by which a change of a file in use is noticed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class FileIdentity(NamedTuple):
    """The state of a file, apart from its contents: every write, truncation or replacement changes it.

    Times are those of the file system, which are as coarse as the system's clock tick: two writes within a few
    milliseconds may leave equal states.

    Attributes:
        size: bytes.
        modified: time of the last write, in ns; programs can set it back.
        changed: time of the last change of contents or attributes, in ns; programs cannot set it.
    """

    inode: int
    size: int
    modified: int
    changed: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """The identity of the file with this status."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def difference(self, path: Path) -> str | None:
        """The change of the file that is now at `path`, in words; None if it is the same file, unchanged."""
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

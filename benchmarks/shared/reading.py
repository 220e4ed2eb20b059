"""Reads a model's files into the page cache."""

from __future__ import annotations

import os
from pathlib import Path


def warm(directory: Path) -> None:
    """Read a folder's weights into the page cache, from nothing, as any reader would."""
    for file in directory.glob("*.safetensors"):
        with file.open("rb", buffering=0) as stream:
            if hasattr(os, "posix_fadvise"):
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while stream.read(1 << 24):
                pass

"""The folder for files that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$MOESCHED_CACHE`, or a folder in the user's cache. It may not exist yet."""
    given = os.environ.get("MOESCHED_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moesched"

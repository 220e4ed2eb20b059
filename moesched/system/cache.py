"""The cache folder, for files that can be made again if they are removed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from moesched.errors import BadInput


def cache_folder() -> Path:
    """Return the cache folder: `$MOESCHED_CACHE`, or by default `moesched` in the user's cache. It may not exist yet.

    Raises:
        BadInput: the folder's name is too long for the file system.
    """
    folder = Path(os.environ.get("MOESCHED_CACHE") or _users_cache() / "moesched")
    try:
        folder.stat()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            return folder  # users of the folder do without it, or say so
        raise BadInput(f"cannot use the cache {folder}: {error.strerror}: set MOESCHED_CACHE") from None
    return folder


def _users_cache() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return folder if folder.is_absolute() else Path.home() / ".cache"  # as XDG's specification has it

"""The cache folder, for files that can be made again if they are removed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from moesched.errors import BadInput
from moesched.system.plain_text import shown


def cache_folder() -> Path:
    """Return the cache folder: `$MOESCHED_CACHE`, or by default `moesched` in the user's cache; it may be absent.

    Raises:
        BadInput: the path is relative, so that its place would depend on the current folder, or its name is too long
            for the file system.
    """
    given = os.environ.get("MOESCHED_CACHE")
    folder = Path(given or _users_cache() / "moesched")
    if given and not folder.is_absolute():
        raise BadInput(f"MOESCHED_CACHE is {shown(given)}, no absolute path: give one that begins with /")
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

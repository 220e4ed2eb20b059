"""Search for the line of a user's code, such as a policy's, that calls the framework or raised an error."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from sys import _getframe
from traceback import walk_tb
from types import FrameType

_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_PACKAGE = Path(__file__).parent.parent


def calling_line() -> str:
    """Return the innermost calling line outside the framework and libraries, as file:line; empty if there is none."""
    frame: FrameType | None = _getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_ours(frame.f_globals.get("__name__", "")) and not is_a_librarys(file):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def raising_line(error: BaseException) -> str:
    """Return the innermost traceback line outside the framework and libraries, as file:line; empty without one."""
    line = ""
    for frame, number in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not is_ours(frame.f_globals.get("__name__", "")) and not is_a_librarys(file):
            line = f"{file}:{number}"
    return line


def is_ours(module: str) -> bool:
    """Test whether a module, given by its full name, belongs to the framework; False for shipped policies."""
    return f"{module}.".startswith("moesched.") and not module.startswith("moesched.policies")


def is_our_file(file: str) -> bool:
    """Test whether a source file, given by its path, belongs to the framework; False for shipped policies."""
    path = Path(file)
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "policies")


def is_pythons(file: str) -> bool:
    """Test whether a source file, given by its path, belongs to Python itself."""
    return file.startswith((_STANDARD_LIBRARY, "<frozen")) and "site-packages" not in file


def is_a_librarys(file: str) -> bool:
    """Test whether a source file, given by its path, belongs to Python or to an installed package.

    Relative paths count as those of packages, since code that Cython compiled has such paths: uvloop/loop.pyx,
    zmq/backend/cython/_zmq.py.
    """
    compiled = file.endswith((".py", ".pyx")) and not Path(file).is_absolute()
    return is_pythons(file) or "site-packages" in file or compiled

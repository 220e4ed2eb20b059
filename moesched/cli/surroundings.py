"""Standard streams and a working directory that a command can rely on."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from pathlib import Path

from moesched.errors import BadInput


def prepare_process() -> None:
    """Make standard output and error accept any text, or refuse to begin.

    Raises:
        BadInput: standard output is closed, or the working directory was removed.
    """
    if sys.stderr is None:  # it is closed; libraries write to it all the same
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # open to the end
    if sys.stdout is None:
        raise BadInput("standard output is closed; redirect it to a file, or to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for characters that its encoding lacks
    try:
        Path.cwd()
    except OSError as error:
        raise BadInput("the working directory was removed; change to another one") from error

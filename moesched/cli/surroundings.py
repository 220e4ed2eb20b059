"""Standard streams and a working directory that a command can rely on."""

from __future__ import annotations

import sys
from io import TextIOWrapper
from pathlib import Path

from moesched.errors import BadInput
from moesched.system.standard_output import command_output


def prepare_process() -> None:
    """Make standard output and standard error accept any text, and check that the process has a working directory.

    Raises:
        BadInput: standard output is closed, or the working directory was removed.
    """
    if sys.stdout is None:
        raise BadInput("standard output is closed; redirect it to a file, or to /dev/null")
    for stream in (command_output(), sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # for characters that its encoding lacks
    try:
        Path.cwd()
    except OSError as error:
        raise BadInput("the working directory was removed; change to another one") from error

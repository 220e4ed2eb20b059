"""Child processes that end with this one, however it ends.

The child's standard input is a pipe from the parent, which closes when the parent ends. On Linux the child also asks
the system for a signal when the parent ends, which reaches the child even while it is busy or stopped.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

from moesched.system.scratch import remove_all

_PR_SET_PDEATHSIG = 1


def tied_child(
    command: Sequence[str], stderr: IO[bytes] | None = None, *, stdout: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start `command` as a child process that ends when this one does; the child has to call `end_with_parent`.

    The child has a session of its own, so that Ctrl-C on the terminal does not reach it. The calling thread must live
    as long as the child.

    Args:
        stderr: the child's standard error; None to share this process's.
        stdout: the child's standard output, such as `subprocess.PIPE`; dropped by default.

    Raises:
        OSError: the child cannot be started.
    """
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, start_new_session=True
    )


def end_with_parent() -> None:
    """End this process when its standard input is closed, or on Linux when the thread that started it has ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_end_with_stdin, name="watches the parent", daemon=True).start()


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    remove_all()
    os._exit(1)

"""A terminal of a given width, to print to."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest

COLUMNS = 80
_STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_END = b"\0"
"""Sent after all output. A reader that waits for the terminal to be closed can lose what is written just before that:
the kernel looks for text first and then for the end.
"""


class Printed:
    """The text that a terminal got; complete once its context is over."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def read(self, descriptor: int) -> None:
        """Collect what comes, up to its end."""
        while not (piece := os.read(descriptor, 1 << 12)).endswith(_END):
            self._pieces.append(piece)
        self._pieces.append(piece.removesuffix(_END))

    @property
    def text(self) -> str:
        """All of it, without styles."""
        return _STYLES.sub("", b"".join(self._pieces).decode()).replace("\r\n", "\n")


@contextmanager
def terminal(stream: Literal["stdout", "stderr"], columns: int = COLUMNS) -> Iterator[Printed]:
    """Let a standard stream of this process be a terminal, whatever COLUMNS says where the tests run."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    printed, before = Printed(), getattr(sys, stream)
    reader = threading.Thread(target=printed.read, args=(ours,))
    reader.start()
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            open(theirs, "w", encoding="utf-8", closefd=False) as out,
        ):
            patch.delenv("COLUMNS", raising=False)
            setattr(sys, stream, out)
            yield printed
    finally:
        setattr(sys, stream, before)
        os.write(theirs, _END)
        reader.join()
        os.close(theirs)
        os.close(ours)

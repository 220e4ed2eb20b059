"""Commands in processes of their own, forked from one that has loaded the libraries: they begin in milliseconds."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path

from commands import Said
from patience import PATIENCE_SECONDS, wait_until


class ForkedCommand:
    """A command that runs, in the current folder and environment; its output goes to two files of a folder."""

    def __init__(self, folder: Path, arguments: Sequence[object]) -> None:
        self._out, self._err = folder / "out", folder / "err"
        for file in (self._out, self._err):
            file.touch()
        context = get_context("forkserver")
        given = [str(each) for each in arguments]
        said = (self._out, self._err)
        self._process = context.Process(target=_run, args=(given, {**os.environ}, *said), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        """The number of its process."""
        assert self._process.pid is not None
        return self._process.pid

    def wait_for(self, text: str) -> None:
        """Wait until it has printed a text."""

        def printed() -> bool:
            ended = not self._process.is_alive()
            found = text in self._out.read_text() + self._err.read_text()
            assert found or not ended, f"ended before it said {text!r}: {self.end()}"
            return found

        wait_until(printed, f"{text!r} of a command")

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def end(self) -> Said:
        """Wait until it has ended."""
        self._process.join(PATIENCE_SECONDS)
        code = self._process.exitcode
        assert code is not None, "it does not end"
        return Said(code, self._out.read_text(), self._err.read_text())


def _run(arguments: Sequence[str], environment: Mapping[str, str], out: Path, err: Path) -> None:
    """Run a command in this process."""
    from moesched.__main__ import main

    gc.freeze()  # the modules that it was forked with stay
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as the environment has it
    for descriptor, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), descriptor)
    sys.argv = ["moesched", *arguments]
    sys.exit(main())

"""Calls of functions in processes of their own: nothing is left of one for the next, and each ends when its time does.

A new process is forked from one that has imported modules and done nothing with them, so it begins in a tenth of a
second, without a CUDA context. It leads a group of its own, so that programs that it starts end with it.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import BytesIO, StringIO, TextIOWrapper
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from moesched.system.collector import rare_collections

LONGEST_REASON = 300
GENTLE_SECONDS = 3.0


def preload(*modules: str) -> None:
    """Have modules imported once, by the process that all others are forked from; no effect once that one runs.

    It must not look for a GPU: the driver does not work in a process that is forked after that.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))


class RowFailed(Exception):
    """A measurement failed; the message is one line."""


class FreshProcess:
    """A call that runs in a process of its own.

    Args:
        function: one that a module has, as processes import it by its name.
        arguments: of the call; they and the result can be pickled.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        self._said = tempfile.NamedTemporaryFile(prefix="moesched-row-")  # noqa: SIM115  # `close` closes it
        self._receiving, sending = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_answer, args=(sending, Path(self._said.name), function, arguments), daemon=True
        )
        self._process.start()
        sending.close()

    def done(self, seconds: float = 0.0) -> bool:
        """Test whether it has ended; waits for it, at most as long as given."""
        return self._receiving.poll(max(0.0, seconds))

    def result(self, seconds: float) -> Any:
        """The result, after at most as many seconds; the process has then ended.

        Raises:
            RowFailed: it raised an error, died, or is not done in time.
        """
        try:
            if not self.done(seconds):
                raise RowFailed(f"not done within {seconds:.0f} s")
            error, value = self._receiving.recv()
            self._process.join(GENTLE_SECONDS)
        except EOFError:
            self._process.join()
            said = Path(self._said.name).read_text(errors="replace")
            raise RowFailed(f"ended with {self._process.exitcode}: {last_line(said)}") from None
        finally:
            self.close()
        if error:
            raise RowFailed(error)
        return value

    def close(self, *, gently: bool = False) -> None:
        """End the process and those that it started.

        gently: whether it may first remove what it has written so far.
        """
        if gently:
            self._signal(signal.SIGINT)
            self._process.join(GENTLE_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._receiving.close()
        self._said.close()

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to its group; there is none before it begins and after it ended."""
        assert self._process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def in_fresh_process(function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
    """The result of a call in a process of its own.

    Raises:
        RowFailed: it raised an error, died, or is not done within as many seconds.
    """
    return FreshProcess(function, *arguments).result(seconds)


def command(*arguments: str) -> Any:
    """Run a command of moesched and return what it prints with --json.

    Raises:
        RowFailed: it failed; with the last line that it said.
    """
    from moesched.cli.main import main

    printed, said = TextIOWrapper(BytesIO()), StringIO()
    with redirect_stdout(printed), redirect_stderr(said):
        code = main([*arguments, "--json"])
    if code:
        raise RowFailed(last_line(said.getvalue()))
    printed.seek(0)
    return json.load(printed)


def last_line(text: str) -> str:
    """The last line of what a program said, which tells why it ended."""
    lines = text.strip().splitlines()
    return lines[-1][:LONGEST_REASON] if lines else "no message"


def _answer(sending: Connection, said: Path, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Call a function and send its result, or the line of its error."""
    os.setpgid(0, 0)
    gc.freeze()  # the modules that it was forked with stay
    with rare_collections(), said.open("w", buffering=1, errors="replace") as stream:
        sys.stdout = sys.stderr = stream
        for descriptor in (1, 2):  # native libraries write to these
            os.dup2(stream.fileno(), descriptor)
        try:
            answer = "", function(*arguments)
        except RowFailed as error:
            answer = str(error), None
        except Exception as error:  # the row says so, and the next one begins
            answer = in_one_line(error), None
        sending.send(answer)


def in_one_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:LONGEST_REASON]

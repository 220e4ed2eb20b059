"""Requests to a peer in a process of its own: a line of JSON each way, with a time limit for every answer.

A peer's process loads its model once and then answers until its standard input ends. Whatever libraries print goes to
standard error, whose last line tells why a process ended.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]
Answer = Callable[[Message], Message]
LONGEST_REASON = 200


class PeerFailed(Exception):
    """A peer could not be set up, ended, gave an error or took too long."""


def serve(load: Callable[[], tuple[Answer, Message]]) -> None:
    """Load a model, report it as the first answer, and answer requests from standard input until it ends."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    answer, ready = load()
    print(json.dumps(ready), file=replies, flush=True)
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line))
        except Exception as error:  # the runner notes it in the row
            reply = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


class Worker:
    """A peer's process.

    Args:
        command: of the process.
        environment: variables beside those of this process.
        seconds: the time limit for loading the model.

    Attributes:
        ready: the report of the process after it loaded.

    Raises:
        PeerFailed: it ended, or did not load in time.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], seconds: float) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, **environment},
            text=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.ready = self._answer(seconds)
        except PeerFailed:
            self.close()
            raise

    def ask(self, request: Message, seconds: float) -> Message:
        """The answer to a request.

        Raises:
            PeerFailed: an error, or no answer in time; after the latter the process has ended.
        """
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerFailed(self._end()) from None
        return self._answer(seconds)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._errors):
            assert stream is not None
            stream.close()

    @property
    def ended(self) -> bool:
        """True if the process is no more."""
        return self._process.poll() is not None

    @property
    def process_id(self) -> int:
        """The process's number."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put("")

    def _answer(self, seconds: float) -> Message:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self._process.kill()
            self._process.wait()
            raise PeerFailed(f"no answer within {seconds:.0f} s") from None
        if not line:
            raise PeerFailed(self._end())
        reply: Message = json.loads(line)
        if "failed" in reply:
            raise PeerFailed(reply["failed"][:LONGEST_REASON])
        return reply

    def _end(self) -> str:
        """The reason why the process ended."""
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"ended with {code}: {said[-1] if said else 'no message'}"[:LONGEST_REASON]

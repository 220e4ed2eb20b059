"""A server before an engine without a model, as processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_engine
import locked_engine
from fronts import TINY

PROGRAM = """
import json, sys
from functools import partial
from pathlib import Path
from moesched.server.options import FrontOptions
from moesched.server.serve import ServerCallbacks, serve
from moesched.system.signals import ends_in_order
tell = partial(print, flush=True)
say = ServerCallbacks(lambda starting: None, lambda url, ready, notes: tell(url), tell)
with ends_in_order():
    serve(Path(sys.argv[1]), FrontOptions(port=0), sys.argv[2:], say)
"""


def engine(lock: Path | None = None, **options: Any) -> list[str]:
    """The command of a fake engine; its answers wait while the file `lock` is locked, if one is given."""
    program = fake_engine.__file__ if lock is None else locked_engine.__file__
    more = [] if lock is None else [str(lock)]
    return [sys.executable, program, json.dumps({"says": [], **options}), *more]


@contextmanager
def server(**options: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server before a fake engine, as processes, and its address."""
    command = [sys.executable, "-c", PROGRAM, str(TINY), *engine(**options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()

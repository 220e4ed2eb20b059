"""Finds coroutines that a policy called without `await`, so that its author gets an error instead of a warning."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from moesched.errors import PolicyError
from moesched.system.source_lines import is_our_file

_NEVER_AWAITED = re.compile(r"coroutine '(?P<name>.+)' was never awaited")
_CREATED = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in ')


@contextmanager
def forgotten_awaits() -> Iterator[list[PolicyError]]:
    """Collect an error, with the call's line, for each coroutine that is dropped in this context and never awaited."""
    found: list[PolicyError] = []

    def note(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        name = _NEVER_AWAITED.search(str(message))
        created = _CREATED.search(str(message))
        if name is None or created is None or is_our_file(created["file"]):
            show(message, category, filename, lineno, file, line)
            return
        error = PolicyError(
            f"{name['name']} was called and not awaited, and did nothing: write `await` before it"
        )
        error.line = f"{created['file']}:{created['line']}"
        found.append(error)

    depth = sys.get_coroutine_origin_tracking_depth()
    with warnings.catch_warnings():
        show = warnings.showwarning
        warnings.filterwarnings("always", "coroutine .* was never awaited", RuntimeWarning)
        warnings.showwarning = note
        sys.set_coroutine_origin_tracking_depth(1)
        try:
            yield found
        finally:
            sys.set_coroutine_origin_tracking_depth(depth)

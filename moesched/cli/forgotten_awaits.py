"""Coroutines that were called and not awaited: Python warns of them, and a policy's author has to hear of it first."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from moesched.errors import PolicyError

_NEVER_AWAITED = re.compile(r"coroutine '(?P<name>.+)' was never awaited")
_CREATED = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+), in ')
_PACKAGE = Path(__file__).parent.parent


@contextmanager
def forgotten_awaits() -> Iterator[list[PolicyError]]:
    """Collect an error, with its line, for each coroutine that is dropped in this context before it was awaited."""
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
        if name is None or created is None or _is_ours(created["file"]):
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


def _is_ours(file: str) -> bool:
    """Whether a file belongs to the framework; the policies that ship do not."""
    path = Path(file)
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "policies")

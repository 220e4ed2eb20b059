"""A guard against runs that do not end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Stuck(Exception):
    """Something did not end in time."""


def within(seconds: float, run: Callable[[], T]) -> T:
    """Return or raise as `run` does; its thread is abandoned if it takes too long.

    Raises:
        Stuck: it took longer.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(run())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise Stuck(f"no end after {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]

"""Implementations of verbs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moesched.tasks import Task

Verb = Callable[[Any], Any]
"""Runs a task of one verb, and returns its value."""


def after(first: Callable[[Any], object], then: Verb) -> Verb:
    """A verb that runs `first`, then `then`, and returns the value of `then`."""

    def both(task: Task) -> Any:
        first(task)
        return then(task)

    return both

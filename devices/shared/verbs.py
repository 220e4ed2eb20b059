"""A function that joins two functions into a verb, a function that runs tasks of one kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moesched.tasks import Task

Verb = Callable[[Any], Any]
"""A function that runs a task of one verb, and returns the task's value."""


def after(first: Callable[[Any], object], then: Verb) -> Verb:
    """Return a verb (function that runs a task) that runs `first`, then `then`, and returns the value of `then`."""

    def both(task: Task) -> Any:
        first(task)
        return then(task)

    return both

"""The type of a device's verbs, functions that run tasks of one kind; `after` puts a function before a verb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moesched.tasks import Task

Verb = Callable[[Any], Any]
"""A function that runs a task of one verb, and returns the task's value."""


def after(first: Callable[[Any], object], then: Verb) -> Verb:
    """Return a function that runs a task by `first`, then by `then`, and returns the value of `then`."""

    def both(task: Task) -> Any:
        first(task)
        return then(task)

    return both

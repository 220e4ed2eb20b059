"""The type of the functions with which a device runs its verbs (kinds of tasks), and a way to join two functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moesched.tasks import Task

Verb = Callable[[Any], Any]
"""A function that runs tasks of one verb (kind of task); it takes a task, and returns the task's value."""


def after(first: Callable[[Any], object], then: Verb) -> Verb:
    """Return a function that runs a task by `first`, then by `then`, and returns the value of `then`."""

    def both(task: Task) -> Any:
        first(task)
        return then(task)

    return both

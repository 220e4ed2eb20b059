"""Implementations of verbs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moesched.tasks import Task

Verb = Callable[[Any], Any]
"""Runs a task of one verb, and returns its value."""


def after(first: Callable[[Task], None], then: Verb) -> Verb:
    """One verb that is two."""

    def both(task: Task) -> Any:
        first(task)
        return then(task)

    return both

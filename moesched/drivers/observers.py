"""All observers of a run as one function: drivers call it for hundreds of thousands of tasks a second."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moesched.seams import Observer
from moesched.tasks import Task


def observers_of_ends(observers: Sequence[Observer]) -> Callable[[Task], object]:
    """The function to call with each task that ended: the observer's own method where there is only one."""
    calls = [observer.ended for observer in observers]
    if len(calls) == 1:
        return calls[0]

    def tell(task: Task) -> None:
        for call in calls:
            call(task)

    return tell

"""Edges between tasks on streams of one device, which the device enforces itself.

A task is enqueued on its stream before the tasks that it waits for on other streams of the device have ended.
`Task.after` lists those: the device runs the task after them. `Task.released` lists the tasks that no longer wait on
the host for the end of this one; a failure is still passed on to them.
"""

from __future__ import annotations

from moesched.tasks import DONE, ISSUED, Task


def kept_on_device(task: Task, other: Task, *, data: bool = False) -> bool:
    """Test whether the device enforces a new edge from `other`; records the edge if so.

    Args:
        data: whether the task needs the result of `other`.
    """
    if other.state != ISSUED or task.lane.domain != other.lane.domain:
        return False
    _wait_there(task, other)
    if data:
        other.released = [*(other.released or ()), task]
    return True


def leave_to_device(task: Task) -> list[Task]:
    """Hand over to the device a task's edges to followers on the same device; returns these followers."""
    domain, followers = task.lane.domain, task.followers or ()
    released = [other for other in followers if other.lane.domain == domain]
    task.followers = [other for other in followers if other.lane.domain != domain]
    task.released = released
    for other in released:
        _wait_there(other, task)
    return released


def _wait_there(task: Task, other: Task) -> None:
    """Have a task wait for another one on their device, listed once even if several blocks link the two."""
    before = task.after or ()
    if other not in before:
        task.after = [*before, other]


def wait_on_host(task: Task) -> bool:
    """Have a task settle only after those that it waits for on its device; returns whether any is unsettled."""
    unsettled = [other for other in task.after or () if other.state < DONE]
    for other in unsettled:
        assert other.followers is not None
        other.followers.append(task)
    task.waits = len(unsettled)
    return bool(unsettled)

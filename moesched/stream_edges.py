"""Records edges between tasks on streams of one device; the device itself, not the engine, enforces these edges.

A task is enqueued on its stream while tasks that it waits for may still run on other streams of the device. Such a task
no longer waits on the host, but if one of the earlier tasks fails, the failure is still passed on to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesched.tasks import DONE, ISSUED, DeviceEdges, Task


def before_on_device(task: Task) -> Sequence[Task]:
    """Return the tasks on other streams of the same device that this task waits for on the device."""
    return () if task.device_edges is None else task.device_edges.before


def followers_on_device(task: Task) -> Sequence[Task]:
    """Return the later tasks that wait for this task on the device, instead of on the host."""
    return () if task.device_edges is None else task.device_edges.followers


def kept_on_device(task: Task, other: Task, *, data: bool = False) -> bool:
    """Test whether the device enforces a new edge from `other` to `task`; if so, record the edge.

    Args:
        task: the task that waits.
        other: the earlier task that it waits for.
        data: whether `task` needs the result of `other`.
    """
    if other.state != ISSUED or task.lane.domain != other.lane.domain:
        return False
    _wait_there(task, other)
    if data:
        _edges(other).followers.append(task)
    return True


def leave_to_device(task: Task) -> list[Task]:
    """Let the device, not the host, make a task's followers on the same device wait for it; return these followers."""
    domain = task.lane.domain
    released: list[Task] = []
    kept: list[Task] = []
    for other in task.followers or ():
        if other.lane.domain == domain:
            released.append(other)
            _wait_there(other, task)
        else:
            kept.append(other)
    task.followers = kept
    if released:
        _edges(task).followers = [*released]
    return released


def _edges(task: Task) -> DeviceEdges:
    edges = task.device_edges
    if edges is None:
        task.device_edges = edges = DeviceEdges()
    return edges


def _wait_there(task: Task, other: Task) -> None:
    """Have a task wait for another one on their device; the edge is listed once even if several blocks link the two."""
    before = _edges(task).before
    if other not in before:
        before.append(other)


def wait_on_host(task: Task) -> bool:
    """Let a task that will not run wait on the host for the earlier tasks that it was to wait for on its device.

    The engine cancels the task once all tasks that it waits for have settled: are done, failed or cancelled.

    Returns:
        whether any of those tasks has not settled yet.
    """
    unsettled = 0
    for other in before_on_device(task):
        if other.state < DONE:
            assert other.followers is not None
            other.followers.append(task)
            unsettled += 1
    task.waits = unsettled
    return unsettled > 0

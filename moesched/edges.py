"""Edges of a new task, which come from the data (sequential task flow).

A task waits for the last writer of each block that it reads, and for the last readers or writer of each block that it
overwrites. Their ids stand in `Task.deps`, and the task joins the followers of those that have not settled. Each
function returns how many tasks the new one waits for on the host; the device keeps the order of those on its streams.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesched.stream_edges import kept_on_device
from moesched.tasks import DONE, Block, Task, cancelled_by


def follow_writers(task: Task, blocks: Sequence[Block]) -> int:
    """Add edges from the last writers of blocks to a task that reads these; a lost value cancels the task."""
    waits = 0
    domain = task.lane.domain
    for block in blocks:
        block.readers.append(task)
        writer = block.writer
        if writer is None:
            continue
        task.deps.append(writer.id)
        followers = writer.followers
        if followers is None:
            if writer.state != DONE and task.cause is None:
                task.cause = cancelled_by(writer)
        elif domain is None or not kept_on_device(task, writer, data=True):
            followers.append(task)
            waits += 1
    return waits


def follow_users(task: Task, blocks: Sequence[Block]) -> int:
    """Add edges from the last readers or writers of blocks to a task that overwrites these."""
    waits = 0
    domain = task.lane.domain
    for block in blocks:
        earlier: Sequence[Task] = block.readers
        if earlier:
            block.readers = []
        elif block.writer is not None:
            earlier = (block.writer,)
        block.writer = task
        for other in earlier:
            if other is task:
                continue
            task.deps.append(other.id)
            followers = other.followers
            if followers is not None and (domain is None or not kept_on_device(task, other)):
                followers.append(task)
                waits += 1
    return waits


def follow(task: Task, others: Sequence[Task]) -> int:
    """Add edges from tasks to a task that needs none of their results."""
    task.deps += [other.id for other in others]
    unsettled = [other.followers for other in others if other.followers is not None]
    for followers in unsettled:
        followers.append(task)
    return len(unsettled)

"""Adds the edges of a new task, which follow from the data that tasks read and write (sequential task flow).

A task waits for the last writer of each block that it reads. For each block that it overwrites, it waits for the tasks
that have read the block since it was last written or, if there are none, for the last writer. `Task.deps` gets the ids
of all these earlier tasks, and the new task is added to the `followers` of those that have not settled. Each function
returns the number of tasks that the new task waits for on the host; the device keeps the order between its own streams.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesched.stream_edges import kept_on_device
from moesched.tasks import DONE, Block, Task, cancelled_by


def follow_writers(task: Task, blocks: Sequence[Block]) -> int:
    """Add edges to `task` from the last writers of the blocks that it reads.

    If one of these writers failed or was cancelled, `task` is cancelled, too.

    Returns:
        The number of these edges that the task waits for on the host.
    """
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
    """Add edges to `task` from the last readers, or else the last writer, of each block that it overwrites.

    Returns:
        The number of these edges that the task waits for on the host.
    """
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
    """Add edges to `task` from others that must settle first but give it no result; return how many are unsettled."""
    task.deps += [other.id for other in others]
    unsettled = [other.followers for other in others if other.followers is not None]
    for followers in unsettled:
        followers.append(task)
    return len(unsettled)

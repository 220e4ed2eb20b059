"""Makes the descriptions of tasks in traces: label, costs, rows, pages, and the policy line that submitted each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moesched.models.layout import Page
from moesched.steps.memory import Pool, Slot
from moesched.steps.model_pages import describe_all
from moesched.tasks import PageTransfer, Task, class_of
from moesched.trace.recording import TaskInfo


def title_of(pool: Pool) -> str:
    """Return a pool's name with its memory, such as "experts in gpu"."""
    return f"{pool.name} in {pool.memory.name}"


class Descriptions:
    """Makes the descriptions of tasks, and finds the policy's lines that submitted tasks; results are cached."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], TaskInfo] = {}
        self._lines: dict[tuple[int, int], str] = {}

    def of(self, task: Task) -> TaskInfo:
        """Return the description of a task; tasks that are alike share one object."""
        moved = _moved(task) if isinstance(task, PageTransfer) else _NOTHING
        numbers = (task.layer, task.micro_batch, task.expert, task.ranges)
        priority_class = class_of(task)
        about = (task.verb, *numbers, id(task.work), tuple(map(id, moved.pages)), moved.pool, priority_class)
        info = self._known.get(about)
        if info is None:
            info = self._known[about] = _task_info(task, moved, priority_class)
        return info

    def line_of(self, task: Task) -> str:
        """Return the policy's line that submitted a task, as file:line; empty if it is not known."""
        place = (id(task.code), task.instruction)
        line = self._lines.get(place)
        if line is None:
            line = self._lines[place] = task.line
        return line


class _Moved(NamedTuple):
    """The pages of weights that a transfer moves, and the pool that they go to.

    Attributes:
        pool: the pool's name with its memory; empty if the pages go to slots that hold one page for the whole run.
        slots: number of pages that the pool has room for.
    """

    pages: Sequence[Page]
    pool: str = ""
    slots: int = 0


_NOTHING = _Moved(())


def _moved(task: PageTransfer) -> _Moved:
    slot = task.slots[0] if task.pages and task.slots else None
    if isinstance(slot, Slot) and not slot.fixed:
        return _Moved(task.pages, title_of(slot.pool), len(slot.pool.slots))
    return _Moved(task.pages)


def _task_info(task: Task, moved: _Moved, priority_class: int) -> TaskInfo:
    work = task.work
    return TaskInfo(
        task.label,
        task.verb,
        type(task).__name__,
        work.kind,
        work.resource,
        task.layer,
        task.micro_batch,
        task.expert,
        work.flops,
        work.nbytes,
        len(moved.pages),
        priority_class,
        moved.pool,
        work.tokens,
        describe_all(moved.pages),
        moved.slots,
    )

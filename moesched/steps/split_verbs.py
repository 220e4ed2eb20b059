"""Verbs that are submitted as several tasks, or as one task with the cost of the experts that its tokens choose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from moesched.engine import Engine
from moesched.models.operations import Operations
from moesched.steps.works import Works
from moesched.tasks import Block, Collective, Decision, Kernel, Lane, Task
from moesched.work import Work

T = TypeVar("T", bound=Task)

SubTask = tuple[Task, Sequence[Block], Sequence[Block]]
"""A task, and the blocks that it reads and writes."""
Split = Callable[[Task, Sequence[Block], Sequence[Block]], Iterator[SubTask]]
"""Turns a verb's own task, with the blocks that it reads and writes, into the tasks of a split verb."""


class SplitVerbs:
    """Submits verbs to an engine, some of them as several tasks.

    Args:
        engine: gets the tasks.
        works: makes the tasks' `Work` objects, which hold FLOPs and bytes.
        split: by a verb's name, a function that yields the verb's tasks; a verb that is not in it is one task.
    """

    def __init__(self, engine: Engine, works: Works, split: Mapping[str, Split]) -> None:
        self._engine = engine
        self._works = works
        self._split = split

    def submit(
        self,
        task: Task,
        reads: Sequence[Block] = (),
        writes: Sequence[Block] = (),
        after: Sequence[Task] = (),
        priority_class: int = 0,
    ) -> Task:
        """Submit a verb's task, or all tasks of a split verb.

        Args:
            reads, writes: blocks of data that the verb reads and writes.
            after: further tasks that the verb waits for; no effect on a split verb.
            priority_class: the tasks' priority on their lanes; lower ones go first.

        Returns:
            the verb's handle: `task` if it is a `Decision`, whose result a policy awaits; else the verb's last task.
        """
        split = self._split.get(task.verb)
        if split is None:
            return self._engine.submit(task, reads, writes, after, priority_class)
        last = task
        for part, needed, left in split(task, reads, writes):
            part.code, part.instruction = task.code, task.instruction
            if isinstance(part, Collective):
                self._engine.collective(part, needed, left)
            else:
                self._engine.submit(part, needed, left, (), priority_class)
            last = part
        return task if isinstance(task, Decision) else last

    def _kernel(self, verb: str, task: Task, work: Work) -> Kernel:
        """Make a kernel that is a part of a verb, on the lane of the verb's own task."""
        return part_of(task, Kernel, task.lane, work, verb, task.operands)


def part_of(task: Task, make: type[T], lane: Lane, work: Work, verb: str, operands: object) -> T:
    """Make a task that is a part of a verb's own task, for the same layer and micro-batch.

    Args:
        task: the verb's own task.
        make: the class of the new task.
        lane, work, verb, operands: arguments of the new task.
    """
    return make(lane, work, verb, task.layer, task.micro_batch, -1, operands, task.step, task.generated)


def signature_of(data: str, task: Task) -> str:
    """Return the name of an exchange for a task, equal on all ranks; `data` is the kind of data, such as "tokens"."""
    return f"{data} of {task.work.tokens} rows, step {task.step}, layer {task.layer}, mb{task.micro_batch}"


class ChosenExperts(SplitVerbs):
    """Submits verbs in a simulation with a given routing: `post_attention` costs what its tokens' experts cost."""

    def __init__(self, engine: Engine, works: Works) -> None:
        super().__init__(engine, works, {"post_attention": self._post_attention})

    def _post_attention(
        self, task: Task, reads: Sequence[Block], writes: Sequence[Block]
    ) -> Iterator[SubTask]:
        task.work = self._works.of_experts("post_attention", task, Operations.post_attention)
        yield task, reads, writes

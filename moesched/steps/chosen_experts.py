"""Gives each `post_attention` task the cost of the experts that its tokens choose, in a simulation with a routing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moesched.engine import Engine
from moesched.models.operations import Operations
from moesched.steps.split_verbs import SplitVerbs, SubTask
from moesched.steps.works import Works
from moesched.tasks import Block, Task


class ChosenExperts(SplitVerbs):
    """Submits verbs to an engine; `post_attention` with its own `Work`, by the rows of each expert."""

    def __init__(self, engine: Engine, works: Works) -> None:
        super().__init__(engine, works, {"post_attention": self._post_attention})

    def _post_attention(
        self, task: Task, reads: Sequence[Block], writes: Sequence[Block]
    ) -> Iterator[SubTask]:
        task.work = self._works.of_experts("post_attention", task, Operations.post_attention)
        yield task, reads, writes

"""The tasks of a verb where several ranks run a model: kernels, and the all-reduces that add up the ranks' parts.

Where a model is cut over several ranks (see `models/tensor_parallel.py`), four verbs are more than one task:

    post_attention   output_projection, all_reduce, post_attention, all_reduce
    route            output_projection, all_reduce, route
    combine          combine, all_reduce
    sample           logits, all_reduce, sample

The all-reduces are part of the verbs, so policies are written as for one accelerator. Only one rank adds the residuals,
so that the sum of the ranks' hidden states is the model's hidden state. Each rank's logits are zero except for its own
rows of the LM head, so that their sum is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moesched.engine import Engine
from moesched.machines import INTERCONNECT
from moesched.models.operations import Operations
from moesched.steps.split_verbs import SplitVerbs, SubTask, part_of, signature_of
from moesched.steps.works import Works
from moesched.tasks import Block, Collective, Kernel, Lane, Task

HIDDEN, LOGITS = "hidden", "logits"
"""The kinds of data that all-reduces add up; their tasks have them as operands."""


class RankTasks(SplitVerbs):
    """Submits the tasks of one tensor-parallel rank to the rank's engine.

    Args:
        interconnect: the lane of the rank's all-reduces.
        works: makes the tasks' `Work` objects, which hold FLOPs and bytes.
        micro_batches: number of micro-batches.
    """

    def __init__(
        self,
        engine: Engine,
        interconnect: Lane,
        works: Works,
        micro_batches: int,
    ) -> None:
        split = {
            "post_attention": self._post_attention,
            "route": self._route,
            "combine": self._combine,
            "sample": self._sample,
        }
        super().__init__(engine, works, split)
        self._lane = interconnect
        self._operations = works.operations
        self._logits = [Block(f"logits mb{index}") for index in range(micro_batches)]

    def _post_attention(
        self, task: Task, reads: Sequence[Block], writes: Sequence[Block]
    ) -> Iterator[SubTask]:
        yield self._output_projection(task), reads, writes
        yield self._all_reduce(task, HIDDEN), writes, writes
        task.work = self._works.of_experts("experts", task, Operations.after_projection)
        yield task, reads, writes
        yield self._all_reduce(task, HIDDEN), writes, writes

    def _route(self, task: Task, reads: Sequence[Block], writes: Sequence[Block]) -> Iterator[SubTask]:
        hidden = writes[:1]
        yield self._output_projection(task), reads, hidden
        yield self._all_reduce(task, HIDDEN), hidden, hidden
        task.work = self._works.of_task("router", task, Operations.router)
        yield task, reads, writes

    def _combine(self, task: Task, reads: Sequence[Block], writes: Sequence[Block]) -> Iterator[SubTask]:
        yield task, reads, writes
        yield self._all_reduce(task, HIDDEN), writes, writes

    def _sample(self, task: Task, reads: Sequence[Block], writes: Sequence[Block]) -> Iterator[SubTask]:
        logits = (self._logits[task.micro_batch],)
        yield self._kernel("logits", task, task.work), reads, logits
        yield self._all_reduce(task, LOGITS), logits, logits
        task.work = self._works.of_task("choice", task, Operations.choice)
        yield task, logits, writes

    def _output_projection(self, task: Task) -> Kernel:
        verb = "output_projection"
        return self._kernel(verb, task, self._works.of_task(verb, task, Operations.output_projection))

    def _all_reduce(self, task: Task, reduced: str) -> Collective:
        rows = task.work.tokens
        nbytes = rows * (
            self._operations.hidden_bytes if reduced == HIDDEN else self._operations.logits_bytes
        )
        work = self._works.work(
            f"all_reduce of {reduced}", INTERCONNECT, rows, lambda _: self._operations.all_reduce(nbytes)
        )
        part = part_of(task, Collective, self._lane, work, "all_reduce", reduced)
        part.signature = signature_of(reduced, task)
        return part

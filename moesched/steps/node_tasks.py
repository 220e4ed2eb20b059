"""The tasks of a verb where several nodes run a model: kernels, and the exchanges between the nodes.

Where nodes share a model's experts (`Plan.place_experts`), `combine` is more than one task:

    combine          partial_sum, all_reduce, combine

Every node attends, routes and samples, with equal results. In a centralised plan only the first node does, and three
verbs are more than one task:

    route            on the first node: route, broadcast                on the others: broadcast, route
    combine          on the first node: partial_sum, gather, combine    on the others: partial_sum, gather
    sample           on the first node: sample, broadcast               on the others: broadcast, sample

Sums are in float32 and added in the order of the nodes. The residual is added afterwards, and the result is rounded
once. So all nodes that attend have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moesched.engine import Engine
from moesched.machines.networks import NETWORK
from moesched.models.operations import Amount, Operations
from moesched.steps.plan import Plan
from moesched.steps.split_verbs import Split, SplitVerbs, SubTask, part_of, signature_of
from moesched.steps.works import Works
from moesched.tasks import Block, Collective, Lane, Task

SUM, ROWS, TOKENS = "sums", "routed rows", "tokens"
"""The kinds of data that exchanges between nodes carry; their tasks have them as operands."""

TOKEN_BYTES = 8

SCATTERED_FROM = 32 << 10
"""Size of a sum in bytes, above which each node adds up one share of the sum and sends that share to all nodes.

Up to this size, every node sends its whole part of the sum to all nodes.
"""


class NodeTasks(SplitVerbs):
    """Submits one node's tasks to that node's engine, where several nodes run a model.

    Args:
        network: the lane of exchanges with the other nodes.
        plan: the node's plan.
        works: makes the tasks' `Work` objects, which hold FLOPs and bytes.
        micro_batches: number of micro-batches.
    """

    def __init__(
        self,
        engine: Engine,
        network: Lane,
        plan: Plan,
        works: Works,
        micro_batches: int,
    ) -> None:
        split: dict[str, Split] = {"combine": self._combine}
        if plan.nodes.centralised:
            split = {"route": self._send, "combine": self._combine, "sample": self._send}
        if not plan.nodes.attends:
            split = {"route": self._take_rows, "combine": self._hand_in, "sample": self._take_tokens}
        super().__init__(engine, works, split)
        self._lane = network
        self._nodes = plan.nodes.count
        self._sum_verb = "gather" if plan.nodes.centralised else "all_reduce"
        self._operations = works.operations
        self._sums = [Block(f"sums mb{index}") for index in range(micro_batches)]

    def _combine(self, task: Task, reads: Sequence[Block], writes: Sequence[Block]) -> Iterator[SubTask]:
        yield from self._hand_in(task, reads, writes)
        task.work = self._works.of_task("add residual", task, Operations.add_residual)
        yield task, (*reads, self._sums[task.micro_batch]), writes

    def _hand_in(self, task: Task, reads: Sequence[Block], writes: Sequence[Block]) -> Iterator[SubTask]:
        """Yield a task that sums up this node's part of a layer's output, and one that exchanges the nodes' sums."""
        sums = (self._sums[task.micro_batch],)
        yield self._kernel("partial_sum", task, task.work), reads, sums
        yield self._exchange(self._sum_verb, task, SUM), sums, sums

    def _send(self, task: Task, reads: Sequence[Block], writes: Sequence[Block]) -> Iterator[SubTask]:
        """Yield the first node's tasks for a verb: first `task` itself, then a broadcast of its result."""
        yield task, reads, writes
        yield self._exchange("broadcast", task, ROWS if task.verb == "route" else TOKENS), writes[-1:], ()

    def _take_rows(self, task: Task, reads: Sequence[Block], writes: Sequence[Block]) -> Iterator[SubTask]:
        yield self._exchange("broadcast", task, ROWS), (), writes
        task.work = self._works.of_task("take rows", task, Operations.take_rows)
        yield task, writes, writes

    def _take_tokens(self, task: Task, reads: Sequence[Block], writes: Sequence[Block]) -> Iterator[SubTask]:
        yield self._exchange("broadcast", task, TOKENS), (), writes
        task.work = self._works.of_task(
            "take tokens", task, lambda _, tokens: Amount(0, tokens * TOKEN_BYTES)
        )
        yield task, writes, writes

    def _exchange(self, verb: str, task: Task, data: str) -> Collective:
        rows = task.work.tokens
        signature = signature_of(data, task)
        if data == SUM:
            signature += "".join(
                f", E{expert} of node {node}" for expert, node in sorted(task.operands.items())
            )
        work = self._works.work(
            f"{verb} of {data}", NETWORK, rows, lambda rows: self._amount(verb, data, rows)
        )
        part = part_of(task, Collective, self._lane, work, verb, data)
        part.signature = signature
        return part

    def _amount(self, verb: str, data: str, rows: int) -> Amount:
        """Return the bytes that an exchange moves through the busiest node's network card, in its busier direction.

        Args:
            verb: the kind of exchange: "broadcast", "gather" or "all_reduce".
            data: the kind of data: `SUM`, `ROWS` (routed rows with their choices) or `TOKENS`.
            rows: number of rows.
        """
        each = {
            SUM: self._operations.sum_bytes,
            ROWS: self._operations.row_and_choices_bytes,
            TOKENS: TOKEN_BYTES,
        }[data]
        others = self._nodes - 1
        if verb == "all_reduce" and rows * each > SCATTERED_FROM:
            return Amount(0, 2 * others / self._nodes * rows * each)
        return Amount(0, others * rows * each)

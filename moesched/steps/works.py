"""Makes the `Work` objects of a run's tasks, which hold FLOPs and bytes; tasks with equal demands share one object."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from operator import add
from typing import TypeAlias

from moesched.machines.cost import cost_model
from moesched.machines.cost_model import CostModel
from moesched.models.footprint import KEPT_ROWS
from moesched.models.kv_blocks import KV_BLOCK_TOKENS
from moesched.models.operations import Amount, Operations
from moesched.models.tensor_sizes import ResidentShare
from moesched.steps.fixed_steps import has_fixed_steps
from moesched.steps.micro_batch import MicroBatch
from moesched.steps.pipeline_stages import PipelineStage
from moesched.steps.plan import Plan
from moesched.steps.verbs.table import ATTENTION, CPU_ATTENTION, LOAD_KV, VERBS
from moesched.tasks import Lane, Task
from moesched.work import Work, WorkPart

GROWING = tuple(verb.name for verb in VERBS if verb.grows)
"""Verbs whose work differs from step to step, since the KV cache grows."""

IN_FIXED_STEPS = ("pre_attention", "post_attention", "sample")
"""Verbs other than attention that launch no kernels in a fixed step: `embed` launches the step as one CUDA graph."""

RowsOfExperts: TypeAlias = Callable[[Task], tuple[int, ...]]
"""Returns the number of rows of each expert that the tokens of a `post_attention` task choose, in any order."""

_TO_THE_HOST_AND_BACK = WorkPart("hop", 0, times=2)


class Works:
    """Makes the `Work` objects of a run (FLOPs and bytes), and sets a micro-batch's works before each of its steps.

    Args:
        chosen: takes a task, and returns the number of rows of each expert that its tokens choose, as a simulation's
            given routing says. If it is None, FLOPs and bytes are the means for tokens that choose uniformly.

    Attributes:
        operations: costs of the operations in the model's typical layer.
        kinds: costs of the operations in each kind of layer, by the kind's number.
        kind_of: for each layer, the number of its kind.
    """

    def __init__(
        self,
        plan: Plan,
        lanes: Mapping[str, Lane],
        stages: Sequence[PipelineStage],
        chosen: RowsOfExperts | None = None,
    ) -> None:
        self.operations = Operations(plan.layout.config, plan.layout.dtype, _resident(plan))
        self.kinds = list(self.operations.kinds.values())
        numbers = {kind: number for number, kind in enumerate(self.operations.kinds)}
        self.kind_of = [numbers[plan.layout.config.layer(layer)] for layer in plan.layers]
        self._plan = plan
        self._lanes = lanes
        self._stages = stages
        self._chosen = chosen
        self._works: dict[tuple[str, str, int, int, bool, tuple[int, ...] | None], Work] = {}
        self._moves: dict[tuple[str, str, int, int, str], tuple[Lane, Work]] = {}
        self._is_fixed = plan.machine.accelerator.replays and has_fixed_steps(plan)

    def work(
        self,
        kind: str,
        resource: str,
        tokens: int,
        amount: Callable[[int], Amount],
        layer_kind: int = 0,
        *,
        joins: bool = False,
        chosen: tuple[int, ...] | None = None,
    ) -> Work:
        """Return the `Work` (FLOPs and bytes) of one kind of operation on `tokens` rows, in one kind of layer.

        Args:
            kind: the kind of operation, such as "expert_ffn".
            resource: the processor that computes it.
            amount: takes a number of rows, and returns their `Amount`: FLOPs, bytes, the smaller operations to look up
                in cost tables, and the share (0 to 1) of the processor's FLOP/s that kernels reach.
            layer_kind: number of the kind of layer.
            joins: whether the launch of an earlier task starts the operation, so that it costs no launch of its own.
            chosen: number of rows of each chosen expert, if the result of `amount` depends on them; None otherwise. It
                only tells cached results apart.
        """
        key = kind, resource, tokens, layer_kind, joins, chosen
        work = self._works.get(key)
        if work is None:
            flops, nbytes, parts, rate = amount(tokens)
            work = self._works[key] = Work(kind, resource, flops, nbytes, tokens, parts, rate, joins)
        return work

    def of_task(self, kind: str, task: Task, amount: Callable[[Operations, int], Amount]) -> Work:
        """Return the `Work` of one kind of operation, with the rows and the layer of a task.

        amount: returns FLOPs and bytes, given the costs of the layer's operations and the number of rows.
        """
        number = self.kind_of[task.layer]
        of_layer = partial(amount, self.kinds[number])
        return self.work(kind, task.work.resource, task.work.tokens, of_layer, number)

    def of_experts(
        self, kind: str, task: Task, amount: Callable[[Operations, int, tuple[int, ...] | None], Amount]
    ) -> Work:
        """Return the `Work` of one kind of operation that runs all experts which the tokens of a task choose.

        amount: returns FLOPs and bytes, given the costs of the layer's operations, the number of the task's rows, and
            the number of rows of each chosen expert (None to take the mean for tokens that choose uniformly).
        """
        number, work = self.kind_of[task.layer], task.work
        operations = self.kinds[number]
        rows_of = self._chosen if operations.layer.feed_forward.experts else None
        chosen = None if rows_of is None else tuple(sorted(rows_of(task)))

        def of_layer(tokens: int) -> Amount:
            return amount(operations, tokens, chosen)

        return self.work(kind, work.resource, work.tokens, of_layer, number, joins=work.joins, chosen=chosen)

    def move(
        self, source: str, destination: str, nbytes: int, pieces: int = 1, *, kind: str = ""
    ) -> tuple[Lane, Work]:
        """Return the lane and the `Work` of moving bytes between two memories.

        Args:
            source, destination: names of the memories.
            nbytes: bytes of all pieces together.
            pieces: number of pieces of equal size, such as pages.
            kind: the name of the kind of work; by default the link's name, as for pages.
        """
        known = self._moves.get((source, destination, nbytes, pieces, kind))
        if known is None:
            lane = self._lanes[self._plan.machine.link(source, destination).lane]
            link = f"{source}->{destination}"
            parts = (WorkPart(link, nbytes / pieces, pieces),)
            known = lane, Work(kind or link, link, nbytes=nbytes, parts=parts)
            self._moves[source, destination, nbytes, pieces, kind] = known
        return known

    def price(self, work: Work) -> int:
        """Return the nanoseconds of work that runs alone, from the cost model if the driver has not stored them yet."""
        if work.nanoseconds >= 0:
            return work.nanoseconds
        return round(self._cost.work(work).seconds * 1e9)

    @cached_property
    def _cost(self) -> CostModel:
        return cost_model(self._plan.machine, self._plan.layout.dtype)

    def size(self, batch: MicroBatch) -> None:
        """Set the works (FLOPs and bytes) for a micro-batch's next step.

        Only attention's works depend on the length of the KV cache.
        """
        needed = batch.phase, len(batch.ends), sum(batch.tokens), batch.whole.routes
        if batch.sized_for != needed:
            numbers = range(len(self.kinds))
            batch.bind(
                self._stages,
                [[self._of_kind(batch, stage, number) for number in numbers] for stage in self._stages],
            )
            batch.sized_for = needed
        self._size_attention(batch)
        batch.enter(self._stages[0], self.kind_of[0])

    def _of_kind(self, batch: MicroBatch, stage: PipelineStage, number: int) -> dict[str, Work]:
        """Make a micro-batch's works, by verb, in layers of the kind `number`; they hold for all steps of a phase."""
        plan, operations = self._plan, self.kinds[number]
        sequences = tokens = plan.batch.sequences(batch.requests)
        if batch.phase == "prefill":
            sequences, tokens = len(batch.ends), sum(batch.tokens)
        accelerator = stage.processors["accelerator"]
        amounts: dict[str, Callable[[int], Amount]] = {
            "embed": operations.embed,
            "pre_attention": operations.pre_attention,
            "post_attention": operations.post_attention,
            "route": operations.route,
            "preview_route": operations.preview_route,
            "combine": operations.combine,
        }
        joining = IN_FIXED_STEPS if self._joins(batch, tokens) else ()
        works = {
            verb: self.work(verb, accelerator, tokens, amount, number, joins=verb in joining)
            for verb, amount in amounts.items()
        }
        if sequences:
            works["sample"] = self.work(
                "sample", accelerator, sequences, operations.sample, joins="sample" in joining
            )
        if plan.batch.beams > 1:
            cached_at = accelerator if batch.kv.on_accelerator[0] else stage.processors["host"]
            unshared = sequences * KV_BLOCK_TOKENS // 2  # beams share all other blocks with their parents
            works["reorder"] = self.work("reorder", cached_at, unshared, operations.copy_kv)
        if not plan.machine.unified:
            fast, slow = stage.memory, plan.memory("host").name
            works["offload_qkv"] = self.move(fast, slow, tokens * operations.qkv_bytes, kind="offload_qkv")[1]
            new = tokens * operations.kv_bytes + sequences * operations.state_bytes
            works["offload_kv"] = self.move(fast, slow, new, kind="offload_kv")[1]
            works["offload_routed"] = self.move(
                fast, slow, tokens * operations.hidden_bytes, kind="offload_routed"
            )[1]
            works["load_hidden"] = self.move(
                slow, fast, tokens * operations.attention_bytes, kind="load_hidden"
            )[1]
        return works

    def _joins(self, batch: MicroBatch, tokens: int) -> bool:
        """Test whether a micro-batch's step of `tokens` rows is one CUDA graph, which its first task launches."""
        return self._is_fixed and batch.phase == "decode" and not batch.whole.routes and tokens <= KEPT_ROWS

    def _size_attention(self, batch: MicroBatch) -> None:
        """Set those works (FLOPs and bytes) of a micro-batch that grow with its KV cache: attention, and KV loads."""
        plan = self._plan
        beams, new = plan.batch.beams, batch.tokens
        decodes = batch.phase == "decode"
        lengths = list(map(add, batch.starts, new))
        if decodes and beams > 1:
            lengths = [length for length in lengths for _ in range(beams)]
        tokens = len(lengths) if decodes else sum(new)
        loads = decodes and plan.kv.slots and not (plan.machine.unified or all(batch.kv.on_accelerator))
        joins = self._joins(batch, tokens)
        for number, operations in enumerate(self.kinds):
            if decodes:
                amount = operations.attention_step(lengths)
            else:
                amount = operations.attention(list(zip(new, lengths, strict=True)))
            flops, nbytes, parts, _ = amount
            there_and_back = (*parts, _TO_THE_HOST_AND_BACK)
            on_host = Work("cpu_attention", plan.machine.roles.host, flops, nbytes, tokens, there_and_back)
            for stage in self._stages:
                here = Work(
                    "attention", stage.processors["accelerator"], flops, nbytes, tokens, parts, joins=joins
                )
                batch.rebind(ATTENTION, stage, number, here)
                batch.rebind(CPU_ATTENTION, stage, number, on_host)
                if loads:
                    cached = operations.held_bytes(length - 1 for length in lengths)
                    _, load = self.move(plan.memory("host").name, stage.memory, cached, kind="load_kv")
                    batch.rebind(LOAD_KV, stage, number, load)


def _resident(plan: Plan) -> ResidentShare:
    """Return the shares (0 to 1) of dense weights and of experts' weights that stay in accelerators' memories."""
    resident = {True: 0, False: 0}
    fast = plan.accelerators
    for fixed in plan.weights.resident:
        if fixed.memory in fast:
            for page in fixed.pages():
                resident[page.expert < 0] += page.nbytes
    config = plan.layout.config
    dense = experts = 0
    for kind, layers in config.kinds.items():
        example = next(layer for layer in plan.layers if config.layer(layer) == kind)
        in_dense = sum(page.nbytes for page in plan.layout.dense(example))
        dense += in_dense * layers
        experts += (sum(page.nbytes for page in plan.layout.layer(example)) - in_dense) * layers
    return ResidentShare(resident[True] / dense, resident[False] / experts if experts else 0.0)

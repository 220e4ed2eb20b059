"""The state that all steps of a run share: the engine, the lanes, the micro-batches, the pipeline's stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Set

from moesched.engine import Engine
from moesched.machines import INTERCONNECT
from moesched.machines.networks import NETWORK
from moesched.models.layout import Page
from moesched.requests.rows import Rows
from moesched.steps.fixed_pages import FixedPages
from moesched.steps.memory import Slot, counts_of, slots_of
from moesched.steps.micro_batch import MicroBatch, chunk_of, whole_micro_batch
from moesched.steps.node_tasks import NodeTasks
from moesched.steps.pipeline_stages import PipelineStage
from moesched.steps.plan import Plan
from moesched.steps.pool_counts import LOADED
from moesched.steps.preview_accuracy import PreviewAccuracy
from moesched.steps.rank_tasks import RankTasks
from moesched.steps.split_verbs import ChosenExperts
from moesched.steps.verbs.table import INPUT, START, STRIDE
from moesched.steps.works import RowsOfExperts, Works
from moesched.tasks import Block, Lane, PageTransfer, Task


class RunState:
    """The state that all steps of a run share.

    Args:
        plan: the policy's plan, whose memory is reserved here.
        engine: gets the tasks.
        lanes: the engine's lanes by name.
        steps: the number of steps; by default one for each token that is to be generated.
        age: tokens that count as generated before the first decode step, to look into the middle of a long run.
        chosen: for a simulation with a given routing, a function that takes a task, and returns the number of rows of
            each expert that the task's tokens choose; None without a given routing.

    Attributes:
        micro_batches: the micro-batches of decode steps.
        prefill_batches: the micro-batches of prefill: chunks where prompts are cut, else the same as `micro_batches`.
        present: the micro-batches of the present step or, between steps, of the next one; some may hold prompts while
            others decode.
        stages: the stages of the pipeline.
        stage_of: for each layer, its stage.
        works: makes the `Work` objects of tasks, which hold FLOPs and bytes.
        kv_slots: the buffers that `load_kv` fills, of all stages.
        free_activations: free blocks of activations. Where the plan limits the micro-batches that may be within a layer
            in prefill, each micro-batch within a layer takes one block.
        stride: the number by which `MicroBatch.progress` grows in a step: `STRIDE` for each layer and for `sample`.
        previews: compares forecasts of the router's choices with its actual choices.
        submit: submits a verb's task to the engine or, if the verb is split into several tasks (see `SplitVerbs`), all
            of them.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        lanes: dict[str, Lane],
        *,
        steps: int | None = None,
        age: int = 0,
        chosen: RowsOfExperts | None = None,
    ) -> None:
        plan.check()
        self.steps = plan.batch.new_tokens if steps is None else steps
        self.plan = plan
        self.engine = engine
        self.lanes = lanes
        self.unified = plan.machine.unified
        self.stages = [PipelineStage(plan, number, lanes) for number in range(len(plan.stages))]
        self.stage_of = [
            stage for stage, layers in zip(self.stages, plan.stages, strict=True) for _ in layers
        ]
        self.works = Works(plan, lanes, self.stages, chosen)
        self._age = age
        kv_roles = plan.kv.roles
        self.micro_batches = [
            whole_micro_batch(
                index,
                requests,
                tuple(role == "accelerator" for role in kv_roles[index]),
                unified=self.unified,
            )
            for index, requests in enumerate(plan.batch.micro_batches)
        ]
        self.prefill_batches = self._chunks() if plan.batch.chunked else self.micro_batches
        for batch, chunk in zip(self.prefill_batches, plan.chunks.values(), strict=True):
            batch.chunk = chunk
        slots = plan.kv.slots * len(self.stages)
        self.kv_slots = [Block(f"keys and values [{number}]") for number in range(slots)]
        self.free_activations = deque(
            Block(f"activations {number}") for number in range(plan.declared.in_flight)
        )
        self.stride = (len(plan.layers) + 1) * STRIDE
        self.present = list(self.prefill_batches)
        self.previews = PreviewAccuracy()
        self.submit = self._submitter(counts=chosen is not None)

    @property
    def limited(self) -> bool:
        """True if, in prefill, fewer micro-batches than all may be within a layer at the same time."""
        return self.plan.declared.in_flight < len(self.prefill_batches)

    def micro_batch(self, number: int) -> MicroBatch:
        """Return the micro-batch with this number, as in `Task.micro_batch`; chunks have numbers after decode's."""
        count = len(self.micro_batches)
        return self.micro_batches[number] if number < count else self.prefill_batches[number - count]

    def begin_step(self) -> dict[int, MicroBatch]:
        """Have the present micro-batches begin a step at the first pipeline stage.

        Returns:
            the micro-batches by number; if all are chunks, they are numbered from 0.
        """
        start = START if self.plan.nodes.attends else INPUT  # only a node that attends has `embed`
        for batch in self.present:
            if batch.served is None:
                self._continue(batch)
            batch.progress = start
            self.works.size(batch)
        only_chunks = all(batch.is_chunk for batch in self.present)
        first = len(self.micro_batches) if only_chunks else 0
        return {batch.index - first: batch for batch in self.present}

    def serve(self, rows: Mapping[int, Rows]) -> None:
        """Set the micro-batches of the next step of continuous batching.

        rows: by the micro-batch's number, the new tokens of its requests in that step.
        """
        self.present = [self.micro_batches[number] for number in rows]
        for batch in self.present:
            batch.serve(rows[batch.index])

    def _continue(self, batch: MicroBatch) -> None:
        """Have a micro-batch's requests begin their next step: with prompts, chunks of prompts, or one token each."""
        if batch.generated == 0:
            assert batch.chunk is not None, (
                "a micro-batch of prompts is a chunk, or has one of all its prompts"
            )
            batch.begin(batch.chunk.starts, batch.chunk.tokens)
            return
        prompts, generated = self.plan.batch.prompts, batch.generated + self._age - 1
        starts = tuple([prompts[request] + generated for request in batch.requests])
        batch.begin(starts, (1,) * len(starts))

    def end_step(self) -> None:
        """Note the end of a step: each request with a complete prompt has one more token, and decodes from now on."""
        through = [batch.whole for batch in self.present if batch.chunk is None or batch.chunk.last]
        for batch in through:
            batch.generated += 1
        self.present = through

    def leave_out(self, ended: Set[int], rows_apart: Callable[[int], bool]) -> None:
        """Leave out requests that have ended, from the next step on.

        A micro-batch whose requests have all ended is skipped. From other micro-batches, ended requests are removed
        only if the results of the remaining ones then keep the same bits; otherwise the ended ones are still computed.

        Args:
            ended: numbers of the requests that have ended.
            rows_apart: takes a number of rows, and tests whether, in micro-batches of at most this size, the bits of a
                row's result do not depend on the other rows.
        """
        batches, self.present = self.present, []
        for batch in batches:
            left = tuple(request for request in batch.requests if request not in ended)
            if left:
                self.present.append(batch)
                rows = len(self.plan.batch.micro_batches[batch.whole.index])
                if len(left) < len(batch.requests) and rows_apart(rows):
                    batch.keep(left)

    def restart(self) -> None:
        """Go back to the first step of the run."""
        for batch in self.micro_batches:
            batch.generated = 0
        self.present = list(self.prefill_batches)

    def skip(self, steps: int) -> None:
        """Continue as if `steps` more steps had been scheduled, each like the one before."""
        for batch in self.present:
            batch.generated += steps

    def pass_on(self, batch: MicroBatch, layer: int, step: int) -> list[PageTransfer]:
        """Have a micro-batch enter the next pipeline stage, which begins with `layer`, in the step `step`.

        Returns:
            the transfers of its hidden state to that stage, to be submitted in this order.
        """
        stage = batch.stage
        nbytes = batch.works["embed"].tokens * self.works.operations.hidden_bytes
        hops = []
        for source, destination in stage.onward:
            lane, work = self.works.move(source, destination, nbytes)
            ends = (source, destination)
            hops.append(
                PageTransfer(lane, work, "pass_hidden", layer, batch.index, -1, ends, step, batch.generated)
            )
        batch.enter(self.stages[stage.number + 1], self.works.kind_of[layer])
        return hops

    def count_pools(self) -> None:
        """Append each pool's counts so far to the pool's log; pools have logs only if a recorder asks for them."""
        for pool in self.plan.weights.pools:
            counts_of(pool).record(self.engine.submitted)

    def load(self, resident: FixedPages) -> list[PageTransfer]:
        """Submit the transfers of resident pages from the memory where the weights come from."""
        return [
            self._bring(page, slot, "load")
            for page, slot in zip(resident.pages(), slots_of(resident), strict=True)
        ]

    def fill(self) -> list[PageTransfer]:
        """Submit the transfers of pages that are in pools before the first step."""
        return [
            self._bring(page, slot, "fetch")
            for pool, pages in self.plan.weights.filled
            for page in pages
            for slot in pool.assign_all([page], self.engine, LOADED, -1)
        ]

    def close(self) -> None:
        """Drop the run's tasks and errors, and the device's views of the slots.

        Otherwise they would never be freed: tasks and slots refer to each other, and the garbage collector does not
        track tasks.
        """
        self.previews.end_step()
        self.engine.forget()
        plan = self.plan
        for pool in (*plan.weights.pools, *plan.weights.resident):
            for slot in slots_of(pool):
                slot.forget()
        for stage in self.stages:
            for views in stage.views:
                views.open.clear()

    def _bring(self, page: Page, slot: Slot, verb: str) -> PageTransfer:
        """Submit the transfer of a page to a slot from the weights' memory; `verb` is "load" or "fetch"."""
        lane, work = self.works.move(self.plan.machine.roles.weights, slot.memory, page.nbytes)
        task = PageTransfer(lane, work, verb, page.layer, -1, page.expert, pages=(page,), slots=(slot,))
        return self.engine.submit(task, (), (slot,))

    def _chunks(self) -> list[MicroBatch]:
        made: dict[int, MicroBatch] = {}
        for number, chunk in self.plan.chunks.items():
            whole = self.micro_batches[chunk.micro_batch]
            made[number] = chunk_of(whole, number, chunk, made.get(chunk.before), unified=self.unified)
        return list(made.values())

    def _submitter(self, *, counts: bool) -> Callable[..., Task]:
        """Return the function that submits a verb's task.

        counts: whether a simulation's given routing says how many rows each expert gets.
        """
        plan, engine = self.plan, self.engine
        count = len(self.micro_batches) + len(self.prefill_batches)
        if plan.layout.config.ranks > 1:
            return RankTasks(engine, self.lanes[INTERCONNECT], self.works, count).submit
        if plan.nodes.count > 1:
            return NodeTasks(engine, self.lanes[NETWORK], plan, self.works, count).submit
        if counts:
            return ChosenExperts(engine, self.works).submit
        return engine.submit

"""Holds the policy under which small models of two layers run while a calibration times their tasks.

In RESIDENT mode all weights stay in memory. In STREAMING mode the weights of both layers are fetched for every
micro-batch. In all other modes only the weights of the second layer are fetched: in FRESH mode for every micro-batch,
in the remaining modes once in each step. In steps of FRESH mode that run each expert as a task of its own, an expert
is fetched just before its task.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum

from moesched.models.layout import Page
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.tasks import Task

RESIDENT_LAYER, FETCHED_LAYER = 0, 1


class Mode(Enum):
    """A mode of a run: which tasks run at once, and when weights are fetched."""

    RESIDENT = "one task after the other, with all weights in memory"
    SERIAL = "one task after the other"
    FRESH = "the same, with weights fetched for every micro-batch"
    STREAMING = "the same, while the weights to be used next are fetched"
    ATTENDING = (
        "pages are fetched while the accelerator computes, and the host attends for some micro-batches"
    )
    SHARING = "accelerator and host each compute some of the experts"

    @property
    def one_by_one(self) -> bool:
        """True if no two tasks run at once."""
        return self in (Mode.RESIDENT, Mode.SERIAL, Mode.FRESH)

    @property
    def fetches_by_step(self) -> bool:
        """True if the second layer's weights are fetched once in each step."""
        return self not in (Mode.RESIDENT, Mode.FRESH, Mode.STREAMING)


class Exercise:
    """The policy of one timed run.

    Args:
        mode: which tasks run at once, and when weights are fetched.
        turn: number of the run. In modes without overlap, steps alternate: if `turn` plus the step's index is even, a
            step submits `post_attention`, otherwise the tasks for the same work: route, experts and combine.
        host_attended: indices of micro-batches whose attention runs on the host, in ATTENDING mode.
    """

    def __init__(self, mode: Mode, turn: int, host_attended: Sequence[int]) -> None:
        self.mode = mode
        self.turn = turn
        self.host_attended = tuple(host_attended)

    def plan(self, plan: Plan) -> None:
        plan.place_kv("accelerator")
        plan.run_experts_on_host()
        pages, kept = plan.layout.layer(FETCHED_LAYER), plan.layout.layer(RESIDENT_LAYER)
        if self.mode is Mode.RESIDENT:
            plan.keep(plan.layout.pages)
            return
        if self.mode is Mode.STREAMING:
            pages = (*pages, *kept)
        else:
            plan.keep(kept)
        self.buffer = plan.pool("accelerator", "fetched", len(pages), pages)

    async def prefill(self, step: Step) -> None:
        if self.mode is Mode.STREAMING:
            for i in step.layers:
                step.fetch(step.pages(i), self.buffer)
        await self._run(step)

    async def decode(self, step: Step) -> None:
        await self._run(step)

    async def _run(self, step: Step) -> None:
        if self.mode is Mode.STREAMING:
            await self._stream(step)
        else:
            await self._layer_by_layer(step)

    async def _stream(self, step: Step) -> None:
        """Run one micro-batch after the other through both layers, and fetch each layer again after its use.

        One layer is fetched while the other computes.
        """
        for j in step.micro_batches:
            step.embed(j)
            for i in step.layers:
                step.pre_attention(i, j)
                step.attention(i, j)
                step.post_attention(i, j)
                step.evict(step.pages(i), self.buffer)
                if j != step.micro_batches[-1] or not step.last:
                    step.fetch(step.pages(i), self.buffer)
                self._sample(step, i, j)
        await self.last

    async def _layer_by_layer(self, step: Step) -> None:
        if self.mode.fetches_by_step:
            fetched = step.fetch(step.pages(FETCHED_LAYER), self.buffer)
            if self.mode is not Mode.ATTENDING:
                await fetched
        for j in step.micro_batches:
            self.last = step.embed(j)
        for i in step.layers:
            if self.mode is Mode.FRESH and i == FETCHED_LAYER:
                await self._fresh_layer(step, i)
            else:
                await self._layer(step, i)
        if self.mode.fetches_by_step:
            step.evict(step.pages(FETCHED_LAYER), self.buffer)
        await self.last

    async def _fresh_layer(self, step: Step, i: int) -> None:
        for j in step.micro_batches:
            by_task = self._by_task(step)
            pages = step.dense_pages(i) if by_task else step.pages(i)
            await self._fetch_alone(step, pages)
            step.pre_attention(i, j)
            step.attention(i, j)
            if by_task:
                await self._fresh_experts(step, i, j)
            else:
                self.last = step.post_attention(i, j)
            step.evict(pages, self.buffer)
            self._sample(step, i, j)

    async def _fresh_experts(self, step: Step, i: int, j: int) -> None:
        for expert in await step.route(i, j):
            pages = step.expert_pages(i, expert)
            await self._fetch_alone(step, pages)
            self.last = step.run_expert(i, expert, j)
            step.evict(pages, self.buffer)
        self.last = step.combine(i, j)

    async def _fetch_alone(self, step: Step, pages: Sequence[Page]) -> None:
        await self.last
        await step.fetch(pages, self.buffer)

    async def _layer(self, step: Step, i: int) -> None:
        attending = self.host_attended if self.mode is Mode.ATTENDING else ()
        others = [j for j in step.micro_batches if j not in attending]
        for index, j in enumerate(others):
            step.pre_attention(i, j)
            step.attention(i, j)
            # Each step pairs it with another micro-batch's experts; it is short enough to end before they do.
            for k in attending[(index + step.index) % len(others) :: len(others)]:
                self._attend_on_host(step, i, k)
            await self._second_half(step, i, j)
            self._sample(step, i, j)
        for j in attending:
            step.post_attention(i, j)
            self._sample(step, i, j)

    def _sample(self, step: Step, i: int, j: int) -> None:
        """Submit `sample` for micro-batch j if layer i is the last.

        `sample` comes right after the layer, whose weights have displaced the LM head from the processor's caches. It
        thus reads the head from memory.
        """
        if i == step.layers[-1]:
            self.last = step.sample(j)

    def _attend_on_host(self, step: Step, i: int, j: int) -> None:
        step.pre_attention(i, j)
        step.offload_qkv(i, j)
        step.cpu_attention(i, j)
        step.load_hidden(i, j)

    def _by_task(self, step: Step) -> bool:
        """Test whether the mode has no overlap, and the step runs route, experts and combine, not `post_attention`."""
        return (step.index + self.turn) % 2 == 1 and self.mode.one_by_one

    async def _second_half(self, step: Step, i: int, j: int) -> None:
        if not self._by_task(step) and self.mode is not Mode.SHARING:
            self.last = step.post_attention(i, j)
            return
        routed = await step.route(i, j)
        on_host = list(routed)[1::2] if self.mode is Mode.SHARING else []
        self.last = run_routed(step, i, j, routed, on_host)


def run_routed(step: Step, i: int, j: int, experts: Iterable[int], on_host: Collection[int]) -> Task:
    """Run micro-batch j's experts of layer i, those in `on_host` on the host; return the task `combine`.

    Args:
        experts: the experts that the micro-batch chose.
        on_host: the experts to run on the host.
    """
    if on_host:
        step.offload_routed(i, j)
    for expert in experts:
        step.run_expert(i, expert, j, at="host" if expert in on_host else "accelerator")
    if on_host:
        step.load_routed(i, j)
    return step.combine(i, j)


class FinishedTasks:
    """Observer that collects finished tasks, except those that load weights before the first step."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def ended(self, task: Task) -> None:
        """Collect a finished task, unless it belongs to the initial loading."""
        if task.step >= 0:
            self.tasks.append(task)

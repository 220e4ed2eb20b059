"""Holds the policy under which small models run while a calibration times their tasks.

In RESIDENT mode all weights stay in memory. In STREAMING mode the weights of both layers are fetched for every
micro-batch. In all other modes only the weights of the second layer are fetched: in FRESH mode for every micro-batch,
else once in each step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import Enum

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
        turn: number of the run. In modes without overlap, a step submits `post_attention` if the sum of turn and step
            is even, otherwise the tasks that replace it: route, experts and combine.
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
                self._fetch(step, i)
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
                self._evict(step, i)
                if j != step.micro_batches[-1] or not step.last:
                    self._fetch(step, i)
                self._sample(step, i, j)
        await self.last

    async def _layer_by_layer(self, step: Step) -> None:
        if self.mode.fetches_by_step:
            fetched = self._fetch(step)
            if self.mode is not Mode.ATTENDING:
                await fetched
        for j in step.micro_batches:
            self.last = step.embed(j)
        for i in step.layers:
            await self._layer(step, i)
        if self.mode.fetches_by_step:
            self._evict(step)
        await self.last

    def _fetch(self, step: Step, i: int = FETCHED_LAYER) -> Task:
        return step.fetch(step.pages(i), self.buffer)

    def _evict(self, step: Step, i: int = FETCHED_LAYER) -> None:
        step.evict(step.pages(i), self.buffer)

    async def _layer(self, step: Step, i: int) -> None:
        attending = self.host_attended if self.mode is Mode.ATTENDING else ()
        others = [j for j in step.micro_batches if j not in attending]
        fresh = self.mode is Mode.FRESH and i == FETCHED_LAYER
        for index, j in enumerate(others):
            if fresh:
                await self.last
                await self._fetch(step)
            step.pre_attention(i, j)
            step.attention(i, j)
            # Each step pairs it with another micro-batch's experts; it is short enough to end before they do.
            for k in attending[(index + step.index) % len(others) :: len(others)]:
                self._attend_on_host(step, i, k)
            await self._second_half(step, i, j)
            if fresh:
                self._evict(step)
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

    async def _second_half(self, step: Step, i: int, j: int) -> None:
        by_task = (step.index + self.turn) % 2 == 1 and self.mode.one_by_one
        if not by_task and self.mode is not Mode.SHARING:
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

"""The policy that a small model is run under beside a GPU, so that every kind of task is timed.

The first layer's weights stay on the GPU, the second one's are fetched in each step. Micro-batches whose KV cache is on
the host are attended to there in even steps, and on the GPU in odd ones, in which their new keys and values are written
to the cache and experts run one by one, every other one on the host. A step's fetch begins with its tasks of one kind,
which change from step to step. Where page-locked memory is limited, fetched pages are staged in it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby

from moesched.calibration.exercise import FETCHED_LAYER, RESIDENT_LAYER
from moesched.models.layout import Page
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.tasks import Task

BESIDE = ("attention", "cache writes", "attention", "experts")
"""Tasks that a fetch runs beside, by the number of its step: attention is on the host in even steps."""


class GpuExercise:
    """The policy of one run.

    Args:
        on_host: micro-batches whose KV cache is on the host.
        beside: whether copies run beside other tasks: a step's fetch, and those of other micro-batches.
    """

    def __init__(self, on_host: Collection[int], *, beside: bool) -> None:
        self.on_host = frozenset(on_host)
        self.beside = beside

    def plan(self, plan: Plan) -> None:
        plan.place_kv("accelerator", set(plan.micro_batches) - self.on_host)
        plan.place_kv("host", self.on_host)
        plan.reserve_kv_buffers(1)
        plan.run_experts_on_host(resident=True)
        plan.keep(plan.layout.layer(RESIDENT_LAYER))
        pages = plan.layout.layer(FETCHED_LAYER)
        self.buffer = plan.pool("accelerator", "fetched", len(pages), pages)
        self.staging = (
            plan.pool("pinned", "staging", len(pages), pages) if plan.machine.roles.pinned else None
        )

    async def prefill(self, step: Step) -> None:
        await self._run(step, one_by_one=False)

    async def decode(self, step: Step) -> None:
        await self._run(step, one_by_one=step.index % 2 == 1)

    async def _run(self, step: Step, *, one_by_one: bool) -> None:
        fetched_beside = BESIDE[step.index % len(BESIDE)] if self.beside else None
        if not self.beside:
            await self._fetch(step, step.pages(FETCHED_LAYER))

        async def fetch_beside(kind: str, i: int, before: Task) -> None:
            if (kind, i) == (fetched_beside, RESIDENT_LAYER):
                await before
                self._fetch(step, step.pages(FETCHED_LAYER))

        host_first = sorted(step.micro_batches, key=lambda j: j not in self.on_host)
        for j in host_first:
            last = step.embed(j)
        for i in step.layers:
            await fetch_beside("attention", i, last)
            for j in host_first:
                step.pre_attention(i, j)
                last = await self._alone(self._attend(step, i, j, on_gpu=one_by_one))
            await fetch_beside("cache writes", i, last)
            if one_by_one or step.kind == "prefill":
                for j in sorted(self.on_host):
                    last = await self._alone(step.offload_kv(i, j))
            await fetch_beside("experts", i, last)
            for j in host_first:
                if one_by_one:
                    await self._experts(step, i, j)
                else:
                    step.post_attention(i, j)
        self._evict(step, step.pages(FETCHED_LAYER))
        for j in host_first:
            last = step.sample(j)
        await last

    async def _alone(self, task: Task) -> Task:
        """Wait for a task that nothing is to run beside."""
        if not self.beside:
            await task
        return task

    def _fetch(self, step: Step, pages: Sequence[Page]) -> Task:
        """Fetch pages, those of each expert by themselves: short copies have one kind of task beside them.

        They are staged before, in one task, so that what is slowed by that is known from what is slowed by fetches.
        """
        if self.staging is not None:
            step.copy_to_pinned(pages, self.staging)
        for _, of_expert in groupby(pages, lambda page: page.expert):
            last = step.fetch(list(of_expert), self.buffer, source=self.staging)
        return last

    def _evict(self, step: Step, pages: Sequence[Page]) -> None:
        step.evict(pages, self.buffer)
        if self.staging is not None:
            step.evict(pages, self.staging)

    def _attend(self, step: Step, i: int, j: int, *, on_gpu: bool) -> Task:
        """Attend to a micro-batch."""
        if step.kv_on_accelerator(j, i):
            return step.attention(i, j)
        if step.phase(j) == "decode" and not on_gpu:
            step.offload_qkv(i, j)
            step.cpu_attention(i, j)
            return step.load_hidden(i, j)
        if step.phase(j) == "decode":
            step.load_kv(i, j)
        return step.attention(i, j)

    async def _experts(self, step: Step, i: int, j: int) -> None:
        routed = await step.route(i, j)
        at_host = list(routed)[1::2]
        if at_host:
            step.offload_routed(i, j)
        for expert in routed:
            step.run_expert(i, expert, j, at="host" if expert in at_host else "accelerator")
        if at_host:
            step.load_routed(i, j)
        step.combine(i, j)

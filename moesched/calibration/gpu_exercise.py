"""The policy that a small model is run under beside a GPU, so that every kind of task is timed.

The first layer's weights stay on the GPU, the second one's are fetched in each step. Micro-batches whose KV cache is on
the host are attended to there in even steps, and on the GPU in odd ones, in which experts run one by one, every other
one on the host. Where page-locked memory is limited, fetched pages are staged in it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from moesched.calibration.exercise import FETCHED_LAYER, RESIDENT_LAYER
from moesched.models.layout import Page
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.tasks import Task


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
        fetched = self._fetch(step, step.pages(FETCHED_LAYER))
        if not self.beside:
            await fetched
        for j in step.micro_batches:
            step.embed(j)
        for i in step.layers:
            for j in step.micro_batches:
                step.pre_attention(i, j)
                attended = self._attend(step, i, j, on_gpu=one_by_one)
                if not self.beside:
                    await attended
                if one_by_one:
                    await self._experts(step, i, j)
                else:
                    step.post_attention(i, j)
        self._evict(step, step.pages(FETCHED_LAYER))
        for j in step.micro_batches:
            last = step.sample(j)
        await last

    def _fetch(self, step: Step, pages: Sequence[Page]) -> Task:
        if self.staging is not None:
            step.copy_to_pinned(pages, self.staging)
        return step.fetch(pages, self.buffer, source=self.staging)

    def _evict(self, step: Step, pages: Sequence[Page]) -> None:
        step.evict(pages, self.buffer)
        if self.staging is not None:
            step.evict(pages, self.staging)

    def _attend(self, step: Step, i: int, j: int, *, on_gpu: bool) -> Task:
        """Attend to a micro-batch, and save its new keys and values where its KV cache is."""
        if step.kv_on_accelerator(j, i):
            return step.attention(i, j)
        if step.kind == "decode" and not on_gpu:
            step.offload_qkv(i, j)
            step.cpu_attention(i, j)
            return step.load_hidden(i, j)
        if step.kind == "decode":
            step.load_kv(i, j)
        step.attention(i, j)
        return step.offload_kv(i, j)

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

"""Holds the policy under which a calibration runs a small model on a GPU, so that every kind of task is timed.

The first layer's weights stay on the GPU; the second layer's weights are fetched in each step. For micro-batches whose
KV cache is on the host, attention runs on the host in even decode steps. In odd steps, attention of these micro-batches
runs on the GPU, and their new keys and values are written to the host's cache. In odd steps, each expert of each
micro-batch is also a task of its own, with every second expert on the host. A step's fetch starts together with one
kind of task (see `BESIDE`), or runs alone without `beside`. If the machine limits page-locked memory, fetched pages are
first copied to such memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby

from moesched.calibration.exercise import FETCHED_LAYER, RESIDENT_LAYER, run_routed
from moesched.models.layout import Page
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.tasks import Task

BESIDE = ("attention", "cache writes", "attention", "experts")
"""Kind of task beside which the fetch of a step starts, by the step's index modulo 4."""


class GpuExercise:
    """The policy of one timed run.

    Args:
        on_host: indices of micro-batches whose KV cache is on the host.
        beside: whether copies run beside other tasks: the step's fetch, and copies of keys, values and hidden states.
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
        """Await a task, so that it runs alone, and return it; with `beside`, return the task without awaiting it."""
        if not self.beside:
            await task
        return task

    def _fetch(self, step: Step, pages: Sequence[Page]) -> Task:
        """Fetch pages, with one transfer per expert, and return the last transfer.

        Each transfer is short enough that only one kind of task runs beside it. If pages are staged, one task stages
        all of them first, so that slowdown by staging can be told from slowdown by fetches.
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
        """Submit the attention of layer i for micro-batch j, and the copies that attention needs; return the last task.

        Args:
            on_gpu: whether attention runs on the GPU even if the KV cache is on the host.
        """
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
        run_routed(step, i, j, routed, list(routed)[1::2])

"""Causes of slowness for `explain.py`: policies with one weakness, a slow device, and dear kinds of work."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from moesched.devices.torch.device import TorchDevice
from moesched.machines.cost import cost_model
from moesched.machines.machine import Machine
from moesched.policies.layer_streaming import LayerStreaming
from moesched.seams import CostModel, Demand
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.tasks import Task
from moesched.work import Work


class OneLayer(LayerStreaming):
    """Layers take turns in a buffer with room for one."""

    def plan(self, plan: Plan) -> None:
        plan.place_kv("accelerator")
        self.buffer = plan.pool("accelerator", "layers", len(plan.layout.layer(0)), plan.layout.pages)

    async def prefill(self, step: Step) -> None:
        self._schedule(step)

    def _schedule(self, step: Step) -> None:
        for j in step.micro_batches:
            step.embed(j)
        for i in step.layers:
            self._fetch(step, i)
            for j in step.micro_batches:
                step.pre_attention(i, j)
                step.attention(i, j)
                step.post_attention(i, j)
        for j in step.micro_batches:
            step.sample(j)


class Sleepy(LayerStreaming):
    """Sleeps before each fetch, while nothing is submitted."""

    def _fetch(self, step: Step, i: int) -> None:
        time.sleep(0.05)
        super()._fetch(step, i)


class AfterTheRouter:
    """Fetches a layer's chosen experts once the router has chosen, into room for all of two layers."""

    def plan(self, plan: Plan) -> None:
        plan.place_kv("accelerator")
        plan.keep([page for page in plan.layout.pages if page.expert < 0])
        experts = [page for page in plan.layout.pages if page.expert >= 0]
        slots = 2 * sum(page.layer == 0 for page in experts)
        self.pool = plan.pool("accelerator", "experts", slots, experts)

    async def prefill(self, step: Step) -> None:
        await self._schedule(step)

    async def decode(self, step: Step) -> None:
        await self._schedule(step)

    async def _schedule(self, step: Step) -> None:
        for j in step.micro_batches:
            step.embed(j)
        for i in step.layers:
            for j in step.micro_batches:
                step.pre_attention(i, j)
                step.attention(i, j)
                for expert in sorted(await step.route(i, j)):
                    pages = step.expert_pages(i, expert)
                    if any(page not in self.pool for page in pages):
                        step.fetch(pages, self.pool)
                    step.run_expert(i, expert, j)
                step.combine(i, j)
        for j in step.micro_batches:
            step.sample(j)


class SlowTorch(TorchDevice):
    """The torch device, on which some kinds of task take longer.

    Args:
        slow: seconds that tasks of a verb take besides.
    """

    def __init__(self, checkpoint: Any, layout: Any, slow: Mapping[str, float]) -> None:
        super().__init__(checkpoint, layout)
        self._slow = slow

    def execute(self, task: Task) -> Any:
        if (seconds := self._slow.get(task.verb, 0.0)) and task.step >= 0:
            time.sleep(seconds)
        return super().execute(task)


class Dear:
    """A machine's costs, of which some are multiplied.

    Args:
        times: factors of duration, by kind of work.
    """

    def __init__(self, machine: Machine, dtype: str, times: Mapping[str, float]) -> None:
        self._cost: CostModel = cost_model(machine, dtype)
        self._times = times

    def work(self, work: Work) -> Demand:
        demand = self._cost.work(work)
        times = self._times.get(work.kind, 1.0)
        return demand._replace(seconds=times * demand.seconds, fixed=times * demand.fixed)

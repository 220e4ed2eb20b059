"""Policies that are wrong on purpose or watch their own runs, found by `package.module:Class`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import ClassVar

from moesched.dispatch.node_steps import NodeExperts
from moesched.policies.ep_balanced import EpBalanced
from moesched.policies.ep_naive import EpNaive
from moesched.policies.ep_router_aided import EpRouterAided
from moesched.policies.resident import Resident
from moesched.steps.plan import Plan
from moesched.steps.step import Step


class ForThree:
    """Wants three nodes, however many there are."""

    expert_parallel = True

    def plan(self, plan: Plan) -> None:
        plan.place_experts([range(plan.layout.config.routed.experts)] * 3)

    async def prefill(self, step: Step) -> None:
        """It does not get that far."""

    decode = prefill


class SlowOnTheSecond(EpRouterAided):
    """Thinks long on the second node, as a machine would that is busy with something else."""

    async def decode(self, step: Step) -> None:
        if step.node == 1:
            time.sleep(0.3)
        await super().decode(step)


class _Awaiting(NodeExperts):
    """Awaits a file after a number of decode steps, so that no node is done before the test is where it wants to be."""

    def __init__(self, file: str = ".", steps: int = 0) -> None:
        super().__init__()
        self._file = Path(file)
        self._steps = steps

    async def decode(self, step: Step) -> None:
        self._steps -= 1
        while self._steps < 0 and not self._file.exists():
            time.sleep(0.002)
        await super().decode(step)


class AwaitingBalanced(_Awaiting, EpBalanced):
    """`ep_balanced` that awaits a file."""


class AwaitingNaive(_Awaiting, EpNaive):
    """`ep_naive` that awaits a file."""


class AwaitingRouterAided(_Awaiting, EpRouterAided):
    """`ep_router_aided` that awaits a file."""


class UnhurriedAlone(AwaitingBalanced):
    """Takes its time for each step while the other nodes are lost, so that they can come back meanwhile."""

    async def decode(self, step: Step) -> None:
        if step.nodes == 1:
            time.sleep(0.1)
        await super().decode(step)


class Once(Resident):
    """Runs once, and fails in a second run."""

    runs = 0
    error: BaseException = RuntimeError("ran twice")

    async def prefill(self, step: Step) -> None:
        Once.runs += 1
        if Once.runs > 1:
            raise Once.error
        await super().prefill(step)


class Diary(Resident):
    """Writes down the batches that it plans."""

    made: ClassVar[list[Diary]] = []

    def __init__(self) -> None:
        self.planned: list[int] = []
        self.steps = 0
        self.made.append(self)

    def plan(self, plan: Plan) -> None:
        super().plan(plan)
        self.planned.append(plan.batch.first_request)

    async def decode(self, step: Step) -> None:
        self.steps += 1
        await super().decode(step)


class Keeping(Diary):
    """Does so in one diary, which counts as empty where a container is looked for."""

    keeps_state = True

    def __len__(self) -> int:
        return 0

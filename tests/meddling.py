"""Policies for tests of what a policy may do, and the case that they run on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesched.errors import PolicyError
from moesched.machines import load_machine
from moesched.runs.policy_errors import policy_line
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.testing import Case, run_on_symbols
from moesched.testing.policy_checks import Clock

CASE = Case(name="seen", machine=load_machine("t4"), layers=3, weights=1.2)
TESTS = str(Path(__file__).parent / "test_")
CLOCKS: tuple[Clock, ...] = ("virtual", "real")


class Everything:
    """Keeps all weights; runs expert by expert. Other policies differ in one of its methods."""

    def plan(self, plan: Plan) -> None:
        plan.place_kv("accelerator")
        self.resident = plan.keep(plan.layout.pages[:-1])
        last = plan.layout.pages[-1:]
        self.pool = plan.pool("accelerator", "last", 1, last, filled=last)
        self.declared = plan

    async def prefill(self, step: Step) -> None:
        for j in step.micro_batches:
            step.embed(j)
            for i in step.layers:
                step.pre_attention(i, j)
                self.attend(step, i, j)
                await self.feed_forward(step, i, j)
            step.sample(j)

    decode = prefill

    def attend(self, step: Step, i: int, j: int) -> None:
        step.attention(i, j)

    async def feed_forward(self, step: Step, i: int, j: int) -> None:
        await self.run_experts(step, i, j)
        step.combine(i, j)

    async def run_experts(self, step: Step, i: int, j: int) -> None:
        for expert in await step.route(i, j):
            step.run_expert(i, expert, j)


Mistake = Callable[[Step, Plan], object]


class Meddling(Everything):
    """Makes a mistake at the start of the first decode step."""

    def __init__(self, mistake: Mistake) -> None:
        self.mistake = mistake

    async def decode(self, step: Step) -> None:
        if step.index == 1:
            self.mistake(step, self.declared)
        await self.prefill(step)


def refused(policy: Any, clock: Clock = "virtual", case: Case = CASE) -> PolicyError:
    """The error of a policy, raised by a line of a test."""
    with pytest.raises(PolicyError) as caught:
        run_on_symbols(policy, case.plan(policy), clock)
    assert policy_line(caught.value).startswith(TESTS), caught.value
    return caught.value

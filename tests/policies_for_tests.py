"""Policies that are wrong on purpose, found by `package.module:Class`."""

from __future__ import annotations

from moesched.plan import Plan
from moesched.step import Step


class ForThree:
    """Wants three nodes, however many there are."""

    expert_parallel = True

    def plan(self, plan: Plan) -> None:
        plan.place_experts([range(plan.layout.config.experts)] * 3)

    async def prefill(self, step: Step) -> None:
        """It does not get that far."""

    decode = prefill

"""Tests, by simulating a few tasks, whether a policy runs an expert once on the tokens of several micro-batches."""

from __future__ import annotations

from moesched.engine import Engine
from moesched.planner.setting import UNLIMITED, Setting
from moesched.runs.decisions import simulated_decisions
from moesched.runs.ranks import Rank
from moesched.runs.virtual_run import VirtualRun
from moesched.tasks import Task


def runs_experts_jointly(setting: Setting) -> bool:
    """Test whether a policy runs an expert once for the tokens of several micro-batches.

    The test runs two steps of two requests, each in a micro-batch of its own, whose tokens all choose the same experts.

    Raises:
        BadInput: the policy makes no plan for two micro-batches, even with unlimited budgets.
    """
    if len(setting.lengths) < 2:
        return False
    batch = setting.batch(2, 1)
    plan, policy = setting.plan(batch, dict.fromkeys(setting.machine.memories, UNLIMITED))
    seen = _JointTasks()
    VirtualRun(
        [Rank(plan, policy)],
        decisions=simulated_decisions(plan, _FirstExperts(setting.layout.config.routed.top_k)),
        make_engine=Engine,
        observers=[seen],
        steps=min(2, batch.new_tokens),
    ).run()
    return seen.any


class _FirstExperts:
    """Routing that sends every token to the experts with the numbers 0 to top-k - 1."""

    def __init__(self, top_k: int) -> None:
        self._top_k = top_k

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        """Return the number of tokens of each chosen expert: all `tokens` for each of the first top-k experts."""
        return dict.fromkeys(range(self._top_k), tokens)


class _JointTasks:
    """Observer that notes whether an expert ran for several micro-batches at once."""

    def __init__(self) -> None:
        self.any = False

    def ended(self, task: Task) -> None:
        """Note whether the task runs an expert for several micro-batches."""
        self.any = self.any or (task.verb == "run_expert" and task.micro_batch < 0)

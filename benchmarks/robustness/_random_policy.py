"""Policies on random models, machines and batches, with symbols for tensors, and at times with a task that fails."""

from __future__ import annotations

from random import Random

from benchmarks.robustness._random_program import Shape
from benchmarks.robustness._random_verdict import Problem, Verdict
from moesched.errors import BadInput, TaskCancelled, TaskFailed
from moesched.plugins import make_policy
from moesched.seams import Policy
from moesched.steps.plan import Plan
from moesched.tasks import CANCELLED, DONE, FAILED, Task
from moesched.testing import Case, Clock, policy_cases, run_on_symbols
from moesched.testing.symbolic.device import SymbolicDevice

POLICIES = (
    "adversarial",
    "adversarial",
    "adversarial",
    "cgopipe",
    "expert_cache",
    "flexgen",
    "layer_streaming",
    "lru_offload",
    "prefetch_gate",
    "resident",
    "twiddler",
)


def run_policy(choose: Random, shape: Shape) -> Verdict:
    """Run a policy to its end and judge it. Policies know one rank only."""
    policy, plan = _fitting(choose)
    failing = choose.randrange(150) if shape.troubled else -1
    watch = _Watch(failing)
    clock: Clock = "real" if shape.real else choose.choice(("virtual", "shared"))
    problems = []
    try:
        ended = run_on_symbols(policy, plan, clock, device=SymbolicDevice(watch.fails), observers=[watch])
        if ended.tokens != ended.expected:
            problems.append(Problem("value", f"{type(policy).__name__} on {plan.machine.name}: wrong tokens"))
    except (TaskFailed, TaskCancelled) as error:
        if watch.failed is None:
            problems.append(Problem("error", repr(error)))
    except AssertionError as error:
        problems.append(Problem("rule", repr(error)))
    problems += [
        Problem("budget", f"{memory.name}: {memory.peak} of {memory.capacity} bytes")
        for memory in plan.memories.values()
        if memory.peak > memory.capacity
    ]
    states = [task.state for task in watch.tasks]
    return Verdict(states.count(DONE), states.count(FAILED), states.count(CANCELLED), problems)


class _Watch:
    """Has one task fail, and keeps those that ran."""

    def __init__(self, failing: int) -> None:
        self.failed: Task | None = None
        self.tasks: list[Task] = []
        self._failing = failing

    def fails(self, task: Task) -> bool:
        """Test whether this is the task to fail."""
        if task.id != self._failing:
            return False
        self.failed = task
        return True

    def ended(self, task: Task) -> None:
        """A task ran."""
        self.tasks.append(task)


def _fitting(choose: Random) -> tuple[Policy, Plan]:
    """A policy and a situation that it can plan for."""
    while True:
        name = choose.choice(POLICIES)
        policy: Policy = make_policy(name, {"seed": choose.randrange(10**6)} if name == "adversarial" else {})
        try:
            return policy, _random_case(choose).plan(policy)
        except BadInput:
            continue


def _random_case(choose: Random) -> Case:
    experts = choose.randint(1, 6)
    return Case(
        name="random",
        machine=choose.choice(policy_cases()).machine,
        layers=choose.randint(1, 5),
        experts=experts,
        top_k=choose.randint(1, experts),
        prompts=tuple(choose.randint(1, 5) for _ in range(choose.randint(1, 6))),
        new_tokens=choose.randint(1, 4),
        micro_batch_size=choose.randint(1, 4),
        weights=choose.uniform(0.2, 1.4),
        pages_per_expert=choose.choice((1, 1, 2, 3)),
    )

"""Runs for tests: a policy over a small model's shape, on the virtual clock or with idle tasks in real time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from moesched.drivers.realtime import RealtimeDriver, SharedEngine
from moesched.engine import Engine
from moesched.jobs.report import JobReport
from moesched.jobs.simulate_model import simulate_model
from moesched.machines import Machine, load_machine
from moesched.machines.cost import cost_model
from moesched.machines.staging import staged
from moesched.machines.sustained import at_peak
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.planner.setting import Setting
from moesched.plugins import find, make_policy
from moesched.requests.batch import split_batch
from moesched.runs.assembly import assemble
from moesched.runs.decisions import simulated_decisions
from moesched.runs.generation import Generation
from moesched.runs.ranks import Rank
from moesched.runs.virtual_run import VirtualRun
from moesched.runs.watched import observers_of
from moesched.seams import Policy
from moesched.steps.plan import Plan
from moesched.tasks import Decision, Task
from moesched.trace import About, LastSteps, Recorder, Recording

FORTY_PERCENT = {"gpu": 700_000_000}

"""A budget that `mixtral-0.8b` in bfloat16 (1.6 GB) does not fit."""


class Ended:
    """Observer that keeps the tasks that ended."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def ended(self, task: Task) -> None:
        self.tasks.append(task)


class Run(NamedTuple):
    """A run that has ended."""

    plan: Plan
    generation: Generation
    engine: Engine
    recording: Recording
    about: About


def virtual_run(policy: str | Policy, recorder: Recorder | LastSteps | None = None, **sizes: Any) -> Run:
    """Run a policy on the virtual clock; `sizes` are those of `make_plan`."""
    policy = make_policy(policy) if isinstance(policy, str) else policy
    recorder = recorder or Recorder()
    plan = make_plan(policy, **sizes)
    virtual = VirtualRun([Rank(plan, policy)], sharing=False, recorder=recorder)
    virtual.run()
    [run] = virtual.rank_runs
    return Run(plan, run.generation, run.engine, recorder.recording(), about(plan, policy, "virtual"))


def staged_run() -> Run:
    """CGOPipe under 40 % of the weights: every kind of lane, transfers in two hops, views of many pages."""
    return virtual_run("cgopipe", machine=staged(load_machine("t4"), "16GB"), budgets=FORTY_PERCENT)


def realtime_run(
    policy: str | Policy,
    recorder: Recorder | LastSteps | None = None,
    *,
    unfinished: AbstractContextManager[object] | None = None,
    **sizes: Any,
) -> Run:
    """Run a policy in real time on worker threads, with tasks that do nothing.

    unfinished: a lock; no task ends while the policy holds it.
    """
    policy = make_policy(policy) if isinstance(policy, str) else policy
    recorder = recorder or Recorder()
    plan = make_plan(policy, **sizes)
    run = assemble(Rank(plan, policy), SharedEngine)
    decide = simulated_decisions(plan)

    def execute(task: Task) -> Any:
        with unfinished or nullcontext():
            return decide(task) if isinstance(task, Decision) else None

    observers = observers_of([run], [], recorder)
    asyncio.run(RealtimeDriver([run.engine], execute, observers=observers).run(run.generation.run()))
    return Run(plan, run.generation, run.engine, recorder.recording(), about(plan, policy, "realtime"))


def make_plan(
    policy: Policy,
    *,
    shape: str = "mixtral-0.8b",
    machine: str | Machine = "t4",
    requests: int = 4,
    prompt: int = 8,
    new_tokens: int = 3,
    micro_batch_size: int = 2,
    budgets: Mapping[str, int] | None = None,
) -> Plan:
    """A policy's plan for some requests with prompts of the same length."""
    batch = split_batch([prompt] * requests, new_tokens, micro_batch_size)
    described = at_peak(load_machine(machine)) if isinstance(machine, str) else machine
    plan = Plan(described, weight_layout(SHAPES[shape]), batch, budgets)
    policy.plan(plan)
    plan.check()
    return plan


def predicted(policy: str, model: str = "mixtral-0.8b", **options: Any) -> JobReport:
    """A simulation without a band; by default of mtbench on a T4."""
    defaults: dict[str, Any] = {"machine": "t4", "workload": "mtbench", "band": False}
    return simulate_model(model, policy=policy, **defaults | options)


def setting(
    policy: str,
    budgets: Mapping[str, int] | None = None,
    *,
    shape: str = "mixtral-8x7b",
    machine: Machine | None = None,
    lengths: Sequence[int] = (100,) * 512,
    new_tokens: int = 16,
) -> Setting:
    """The model, machine and batch that a policy is planned for; by default Mixtral 8x7B on a T4."""
    where, layout = machine or load_machine("t4"), weight_layout(SHAPES[shape])
    return Setting(
        make=find("policies", policy),
        machine=where,
        layout=layout,
        lengths=tuple(lengths),
        new_tokens=new_tokens,
        cost=cost_model(where, layout.dtype),
        budgets=dict(budgets or {}),
    )


def cached_on_host(plan: Plan) -> int:
    """Bytes that a plan reserves for the KV cache in the host's memory."""
    reserved = plan.reservations.of(plan.declared)
    return sum(each.nbytes for each in reserved if (each.memory, each.content) == ("host", "KV cache"))


def about(plan: Plan, policy: Policy, driver: str) -> About:
    """Model, machine and batch of a test's run."""
    return About(
        driver="virtual" if driver == "virtual" else "realtime",
        policy=type(policy).__name__,
        model=plan.layout.config.name,
        machine=plan.machine.name,
        plan={"micro_batches": len(plan.micro_batches)},
    )

"""Plans a server: finds capacity, policy and plan for a number of users and the longest request."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from moesched import plugins
from moesched.errors import BadInput
from moesched.inputs.budgets import PROCESS
from moesched.inputs.lookup import find_machine
from moesched.jobs.cut_prompts import cuts_prompts, with_cut_prompts
from moesched.jobs.job import Job, policy_until_chosen
from moesched.jobs.memory_ahead import computes_on_cpu
from moesched.jobs.options import PlannedOptions
from moesched.jobs.planners_choice import choose_policy_of
from moesched.jobs.served_options import USERS, ServedOptions
from moesched.machines import Machine
from moesched.models.config import ModelConfig
from moesched.planner.chunks import SMALLEST_CHUNK
from moesched.planner.schedules import with_chunk
from moesched.planner.search_policies import plannable
from moesched.runs.planning import SMALLER
from moesched.runs.served_parts import require_one_accelerator
from moesched.seams import Device, Policy
from moesched.serving.capacity import Capacity, capacity_for
from moesched.steps.plan import Plan

REMEDY = "raise --budget if you gave one, lower --batch-size or --context, or choose another policy"
"""Remedies for a server's plan that does not fit."""


class ServingPlan(NamedTuple):
    """A server's capacity, and the plan that a policy made for a batch that fills it.

    Attributes:
        capacity: the largest number of requests and tokens that run together.
        policy_name: name of the policy in reports.
        predicted: tokens per second that the planner predicted for the policy that it chose; None if one was named.
    """

    capacity: Capacity
    plan: Plan
    policy: Policy
    policy_name: str
    predicted: float | None


def context_of(given: int | None, default: int, config: ModelConfig) -> int:
    """Return the largest number of tokens of a request with its answer: `given`, or `default` if `given` is None.

    Raises:
        BadInput: the model's context is shorter.
    """
    context = default if given is None else given
    if context > config.max_positions:
        raise BadInput(
            f"--context is {context:,}, and that of {config.name} is {config.max_positions:,}: give at most that"
        )
    return context


def serving_job(
    given: PlannedOptions,
    config: ModelConfig,
    machine: Machine,
    *,
    nodes: int = 1,
    device: str | type[Device] | None = None,
) -> Job:
    """Return the job of a server, which plans for as many requests at once as the option `batch_size` says.

    Raises:
        BadInput: an option cannot be used.
    """
    given = replace(given, batch_size=given.batch_size or USERS)
    return Job(given, config, machine, nodes=nodes, device=device)


def require_plan(given: ServedOptions, config: ModelConfig, context: int) -> None:
    """Refuse unusable options early, before the device's libraries are imported, which takes seconds.

    An unknown policy is refused. The other checks are only for the device CPU: an unknown machine or memory is refused.
    So are sizes that do not fit, but only if the machine has one memory and the process has no budget.

    Args:
        context: the largest number of tokens of a request.

    Raises:
        BadInput: an option cannot be used, or no plan fits.
    """
    policy_until_chosen(given)
    if not computes_on_cpu(given):
        return
    job = serving_job(given, config, find_machine(given.machine, foreign=given.foreign_machine))
    if PROCESS in (given.budgets or {}) or not job.machine.unified:
        return
    shipped = set(plugins.shipped_policies())  # others may raise anything
    names = [name for name in plannable() if name in shipped]
    tried = (job.with_policy(name, 0.0) for name in names) if job.chooses else (job,)
    if not any(_may_fit(each, context) for each in tried):
        plan_serving(job, context)


def _may_fit(job: Job, context: int) -> bool:
    """Test whether the smallest plan for requests of `context` tokens fits: micro-batches of one, smallest chunks."""
    setting = job.setting(*_requests(job, context))
    smallest = with_chunk(setting, setting.prefill_chunk or SMALLEST_CHUNK)
    return smallest.fits(smallest.batch(len(setting.lengths), 1))


def plan_serving(
    job: Job,
    context: int,
    *,
    on_progress: Callable[[str], object] = lambda what: None,
) -> ServingPlan:
    """Plan for continuous batching of requests, each of which may have `context` tokens.

    Args:
        job: a job by `serving_job`, with its device set.
        on_progress: called with the name of each stage of the planner's search.

    Raises:
        BadInput: no plan fits, or the policy is for several accelerators or machines.
    """
    if not job.chooses:
        job.use_process()
        return _planned(job, context)
    return choose_policy_of(
        job,
        *_requests(job, context),
        plan=lambda its_job: _planned(its_job, context),
        on_progress=on_progress,
    )


def _planned(job: Job, context: int) -> ServingPlan:
    try:
        sizes = job.sizes(*_requests(job, context), successive=False)
        capacity, plan, policy = _fullest(job, capacity_for(sizes, context))
    except BadInput as error:
        if not str(error).endswith(SMALLER):
            raise
        raise BadInput(str(error).removesuffix(SMALLER) + REMEDY) from error
    require_one_accelerator(plan, policy, job.nodes)
    return ServingPlan(capacity, plan, policy, job.policy_name, job.chosen_at)


def _fullest(job: Job, capacity: Capacity) -> tuple[Capacity, Plan, Policy]:
    """Return capacity, plan and policy; cuts prompts if the user asks, or if that fits and `cuts_prompts` is True."""
    asked = job.options.prefill_chunk
    cut = with_cut_prompts(capacity, asked)
    try:
        plan, policy = job.plan(cut.fullest())
    except BadInput:
        if asked is None:  # the mask of a part may take more than a small model's whole prompts
            with suppress(BadInput):
                return capacity, *job.plan(capacity.fullest())
        raise
    if cuts_prompts(plan, asked):
        return cut, plan, policy
    return capacity, *job.plan(capacity.fullest())


def _requests(job: Job, context: int) -> tuple[list[int], int]:
    """Return prompt lengths and a number of new tokens, each half of `context`, for the choice of batch sizes."""
    assert job.options.batch_size is not None, "serving_job sets it"
    return [context // 2] * job.options.batch_size, context - context // 2

"""The plan of a server: from the number of users and the longest request to a capacity, a policy and its plan."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import NamedTuple

from moesched.errors import BadInput
from moesched.inputs.defaults import POLICY
from moesched.jobs.cut_prompts import with_cut_prompts
from moesched.jobs.job import Job
from moesched.jobs.options import PlannedOptions
from moesched.jobs.served_options import USERS
from moesched.machines import Machine
from moesched.models.config import ModelConfig
from moesched.models.layout import Page
from moesched.planner import FIRST, Look, fastest_policies, require_one_policy
from moesched.runs.planning import SMALLER
from moesched.runs.served_parts import require_one_accelerator
from moesched.seams import Device, Policy
from moesched.serving.capacity import Capacity, capacity_for
from moesched.steps.plan import Plan
from moesched.steps.process import Process

REMEDY = "raise --budget, or lower --batch-size or --context"
"""Remedies where a server's plan does not fit."""


class ServingPlan(NamedTuple):
    """A capacity, and a policy's plan of its fullest batch.

    Attributes:
        policy_name: name of the policy in reports.
        predicted: tokens per second with all places full, where the planner chose the policy; else None.
    """

    capacity: Capacity
    plan: Plan
    policy: Policy
    policy_name: str
    predicted: float | None = None


def context_of(given: int | None, default: int, config: ModelConfig) -> int:
    """The most tokens of a request: `given`, or by default `default`.

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
    """The job of a server, which plans for as many requests at once as the options say.

    Raises:
        BadInput: an option cannot be used.
    """
    policy = given.policy
    if policy == POLICY:
        require_one_policy(given.settings)
        if nodes > 1:
            raise BadInput(
                f"the planner chooses a policy for one machine: name one for {nodes} with --policy"
            )
        policy = FIRST  # until the planner has chosen
    given = replace(given, policy=policy, batch_size=given.batch_size or USERS)
    return Job(given, config, machine, nodes=nodes, device=device)


def plan_serving(
    job: Job,
    context: int,
    slot_bytes: Callable[[Page], int],
    process: Callable[[], Process],
    *,
    chooses: bool,
    on_progress: Callable[[str], object] = lambda what: None,
) -> ServingPlan:
    """Plan for requests that join and leave, each of which may have `context` tokens.

    Args:
        job: a job by `serving_job`, which knows its device.
        slot_bytes: returns the bytes of a slot for a page.
        process: returns the process that will run the plan, as it is at the call.
        chooses: whether the planner chooses the policy, instead of the job's own.
        on_progress: called with the name of each stage of the planner's search.

    Raises:
        BadInput: no plan fits, or the policy is for several accelerators or machines.
    """
    if not chooses:
        job.use_process(process())
        return _planned(job, context, slot_bytes)
    looking = copy(job)
    looking.use_process(process())
    looks = _looks(looking, context, slot_bytes, on_progress)
    job.use_process(process())  # the search took memory
    refusals = []
    for look in looks:
        try:
            found = _planned(job.with_policy(look.policy), context, slot_bytes)
        except BadInput as error:  # places may hold longer prompts than the look's requests have
            refusals.append(error)
        else:
            return found._replace(predicted=look.throughput)
    raise refusals[0]


def _planned(job: Job, context: int, slot_bytes: Callable[[Page], int]) -> ServingPlan:
    try:
        sizes = job.sizes(*_requests(job, context), slot_bytes, successive=False)
        capacity = capacity_for(sizes, context)
        plan, policy = job.plan(capacity.fullest(), slot_bytes)
        capacity = with_cut_prompts(capacity, plan, job.options.prefill_chunk)
    except BadInput as error:
        if not str(error).endswith(SMALLER):
            raise
        raise BadInput(str(error).removesuffix(SMALLER) + REMEDY) from error
    require_one_accelerator(plan, policy, job.nodes)
    return ServingPlan(capacity, plan, policy, job.policy_name)


def _looks(
    job: Job, context: int, slot_bytes: Callable[[Page], int], on_progress: Callable[[str], object]
) -> list[Look]:
    """The policies that hold as many requests as there are users, the fastest first; or one that does not."""
    users, size = _users(job), job.options.micro_batch_size
    sizes = [min(size, users)] if size else [users, -(-users // 4), 1]
    looks = fastest_policies(job.setting(*_requests(job, context), slot_bytes), sizes, on_progress)
    return [look for look in looks if look.throughput] or looks[:1]


def _requests(job: Job, context: int) -> tuple[list[int], int]:
    """Prompts and new tokens of the requests that sizes are chosen for: half of the context each."""
    return [context // 2] * _users(job), context - context // 2


def _users(job: Job) -> int:
    assert job.options.batch_size is not None, "serving_job sets it"
    return job.options.batch_size

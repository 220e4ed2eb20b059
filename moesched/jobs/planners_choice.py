"""The planner's choice of a policy: of those that it predicts to be fast, the first whose plan fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import TypeVar

from moesched.errors import BadInput
from moesched.inputs.chosen_policy import PolicyGiven
from moesched.inputs.defaults import POLICY
from moesched.jobs.job import Job
from moesched.jobs.options import PlannedOptions
from moesched.models.layout import Page
from moesched.planner import FIRST, PolicyEstimate, fastest_policies, require_one_policy
from moesched.steps.process import Process

Found = TypeVar("Found")


def policy_until_chosen(given: PlannedOptions) -> PolicyGiven:
    """Return the policy that the options name; if the planner is to choose, the policy that a job begins with.

    Raises:
        BadInput: the planner is to choose, and the options have settings for a policy.
    """
    if given.policy != POLICY:
        return given.policy
    require_one_policy(given.settings)
    return FIRST


def chooses_for_one_machine(nodes: int) -> BadInput:
    """Return the error for several nodes without a named policy: the planner chooses only for one machine."""
    return BadInput(f"the planner chooses a policy for one machine: name one for {nodes} with --policy")


def choose_policy_of(
    job: Job,
    lengths: Sequence[int],
    new_tokens: int,
    slot_bytes: Callable[[Page], int],
    process: Callable[[], Process],
    plan: Callable[[Job], Found],
    on_progress: Callable[[str], object],
) -> tuple[Found, PolicyEstimate]:
    """Choose a policy for requests that run together.

    Args:
        job: a job that knows its device; afterwards it knows its process, too.
        lengths: prompt tokens of each request.
        slot_bytes: returns the bytes of a slot for a page.
        process: returns the process that will run the plan, as it is at the call: the search takes memory.
        plan: plans by a copy of the job that has a policy.
        on_progress: called with the name of each stage of the search.

    Returns:
        The first plan that fits, and what the planner predicts of its policy.

    Raises:
        BadInput: no plan fits; the error is that of the policy with the highest predicted rate.
    """
    looking = copy(job)
    looking.use_process(process())
    estimates = _estimates(looking, lengths, new_tokens, slot_bytes, on_progress)
    job.use_process(process())
    refusals = []
    for estimate in estimates:
        try:
            return plan(job.with_policy(estimate.policy)), estimate
        except BadInput as error:  # an estimate has other sizes than the plan
            refusals.append(error)
    raise refusals[0]


def _estimates(
    job: Job,
    lengths: Sequence[int],
    new_tokens: int,
    slot_bytes: Callable[[Page], int],
    on_progress: Callable[[str], object],
) -> list[PolicyEstimate]:
    """Return the planner's predictions, the fastest policy first, for as many requests as some policy holds at once.

    These are all of the requests, or else the first half of them, the first quarter, and so on.
    """
    count, size = len(lengths), job.options.micro_batch_size
    sizes = [min(size, count)] if size else [count, -(-count // 4), 1]
    estimates = fastest_policies(job.setting(lengths, new_tokens, slot_bytes), sizes, on_progress)
    holding = [estimate for estimate in estimates if estimate.throughput]
    if holding or count == 1:
        return holding or estimates[:1]
    return _estimates(job, lengths[: count // 2], new_tokens, slot_bytes, on_progress)

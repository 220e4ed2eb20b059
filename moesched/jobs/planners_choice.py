"""Lets the planner choose a policy: of the policies predicted to be fast, the first whose plan fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import TypeVar

from moesched.errors import BadInput
from moesched.inputs.options import SizeOptions
from moesched.jobs.job import Job
from moesched.planner.search_policies import PolicyEstimate, fastest_policies, plan_best
from moesched.planner.sizing import sizes_of
from moesched.runs.listeners import Listener

Found = TypeVar("Found")


def with_choice(
    job: Job,
    lengths: Sequence[int],
    new_tokens: int,
    listener: Listener,
) -> Job:
    """Return a copy of a job with the planner's choice of a policy, for requests that run in one or several batches.

    Args:
        lengths: prompt lengths in tokens.
        listener: told of each stage of the search.

    Raises:
        BadInput: no plan fits. If policies were tried, this is the error of the policy that was tried first.
    """

    def planned(its_job: Job) -> Job:
        copy(its_job).sizes(lengths, new_tokens)
        return its_job

    return choose_policy_of(job, lengths, new_tokens, plan=planned, on_progress=_telling(listener))


def with_best_plan(
    job: Job,
    lengths: Sequence[int],
    new_tokens: int,
    listener: Listener,
) -> Job:
    """Return a copy of a job with the policy that `moesched plan` ranks first for these requests.

    The copy has the sizes of that plan, unless the options give some.

    Args:
        lengths: prompt lengths in tokens.
        listener: told of each stage of the search.

    Raises:
        DoesNotFit: no policy fits.
    """
    job.use_process()
    setting = job.setting(lengths, new_tokens)
    best = plan_best(
        setting.machine,
        setting.layout,
        setting.lengths,
        new_tokens,
        micro_batch_size=job.options.micro_batch_size,
        band=False,
        on_progress=_telling(listener),
        budgets=setting.budgets,
        slot_bytes=job.slot_bytes,
        beams=setting.beams,
        prefill_chunk=setting.prefill_chunk,
        process=setting.process,
    )
    chosen = job.with_policy(best.policy, best.schedule.throughput)
    if job.options.sizes != SizeOptions():
        return chosen
    return chosen.with_sizes(sizes_of(chosen.setting(lengths, new_tokens), best.schedule))


def _telling(listener: Listener) -> Callable[[str], object]:
    """Return a function that tells a listener the name of a stage of the planner's search."""
    return lambda stage: listener.preparing(f"planning: {stage}", 0, 0)


def choose_policy_of(
    job: Job,
    lengths: Sequence[int],
    new_tokens: int,
    plan: Callable[[Job], Found],
    on_progress: Callable[[str], object],
) -> Found:
    """Choose a policy for requests that run together.

    Args:
        job: a job with its devices set. `use_process`, a method that counts the process's own bytes against a budget,
            is called here: on a copy of the job before the search, and on the job itself after the search.
        lengths: prompt tokens of each request.
        plan: makes the plan of a job whose policy is set; raises BadInput if it does not fit.
        on_progress: called with the name of each stage of the search.

    Returns:
        The result of `plan` for the first policy whose plan fits; the fastest policies are tried first.

    Raises:
        BadInput: no plan fits. If policies were tried, this is the error of the policy that was tried first.
    """
    looking = copy(job)
    looking.use_process()
    estimates = _estimates(looking, lengths[: job.options.batch_size], new_tokens, on_progress)
    job.use_process()
    refusals = []
    for estimate in estimates:
        try:
            return plan(job.with_policy(estimate.policy, estimate.throughput))
        except BadInput as error:  # an estimate has other sizes than the plan
            refusals.append(error)
    raise refusals[0]


def _estimates(
    job: Job,
    lengths: Sequence[int],
    new_tokens: int,
    on_progress: Callable[[str], object],
) -> list[PolicyEstimate]:
    """Return the planner's predictions for policies with which all requests fit at once, in the order to try them.

    If there is no such policy, the predictions are for the first half of the requests, else for the first quarter, and
    so on. If no schedule is found even for a single request, the result has one policy, with a throughput of 0.
    """
    count, size = len(lengths), job.options.micro_batch_size
    sizes = [min(size, count)] if size else [count, -(-count // 4), 1]
    estimates = fastest_policies(job.setting(lengths, new_tokens), sizes, on_progress)
    holding = [estimate for estimate in estimates if estimate.throughput]
    if holding or count == 1:
        return holding or estimates[:1]
    return _estimates(job, lengths[: count // 2], new_tokens, on_progress)

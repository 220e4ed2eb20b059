"""Searches for the best policy: simulates each briefly, then searches for the sizes of the most promising."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

import msgspec
from msgspec.structs import replace

from moesched import plugins
from moesched.drivers.pricing import no_garbage_collection
from moesched.errors import BadInput, DoesNotFit
from moesched.inputs.chosen_policy import ChosenPolicy, PolicyGiven, choose_policy
from moesched.inputs.options import Objective
from moesched.machines import Machine
from moesched.machines.cost import cost_model
from moesched.models.layout import Page, WeightLayout
from moesched.planner.candidate import Candidate
from moesched.planner.chunks import with_room
from moesched.planner.objectives import close, requests_for
from moesched.planner.ranking import Misfit, Ranked, in_order, misfit, ranked
from moesched.planner.resources import Gain, gains
from moesched.planner.schedules import Schedule
from moesched.planner.setting import KV_SHARE, Setting, splits_kv
from moesched.planner.sizing import first_schedule
from moesched.planner.uncertainty import Uncertainty
from moesched.seams import is_expert_parallel
from moesched.steps.process import Process

Found = TypeVar("Found")

FIRST = "resident"
"""The policy that wins a tie, since it moves nothing."""
TIE = 1.05
"""In an estimate, a policy beats `FIRST` only if it is faster by more than this factor, since estimates are rough."""
PROMISING = 0.75
"""A policy's sizes are searched for if its rate is at least this share of the best rate so far."""
MOST_TASKS = 60_000
"""After this number of simulated tasks, no further policy's sizes are searched for."""
MOST_DEEP_TASKS = 200_000
"""Largest number of tasks in a run of all layers for a policy that comes close to the best."""
MOST_FAR_TASKS = 100_000
"""Largest total of tasks in the runs of all layers of policies that do not come close to the best."""


class BestPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan found.

    Attributes:
        policy: name of the policy.
        schedule: the plan's simulated schedule: sizes and predicted figures.
        attention_on_gpu, ffn_on_gpu: whether the GPU computes attention and the FFN in decode.
        bound_by: the busiest lane in a decode step; in the prefill if there is no decode step.
        gains: for each resource the relative gain from a tenth more of it, the largest first. The gain is in the bound
            on throughput or, if the plan is for one request, in the predicted rate.
        ranking: all policies, the best first; those that do not fit are last.
        uncertainty: the band of the schedule's figures; None if it was not asked for.
    """

    policy: str
    schedule: Schedule
    attention_on_gpu: bool
    ffn_on_gpu: bool
    bound_by: str
    gains: list[Gain]
    ranking: list[Ranked]
    uncertainty: Uncertainty | None


def plannable() -> list[str]:
    """Return the names of the installed policies that one machine can run; `FIRST`, which wins a tie, comes first.

    Policies that cannot be loaded are included, as the ranking gives the reason.
    """
    names = [name for name in plugins.names("policies") if not _needs_others(name)]
    return sorted(names, key=lambda name: name != FIRST)


class SearchOptions(TypedDict, total=False):
    """Fields of `Setting`, all optional, that callers of a search may give."""

    budgets: dict[str, int]
    slot_bytes: Callable[[Page], int] | None
    beams: int
    prefill_chunk: int | None
    process: Process | None


def plan_best(
    machine: Machine,
    layout: WeightLayout,
    lengths: Sequence[int],
    new_tokens: int,
    *,
    objective: Objective = "throughput",
    policies: Iterable[PolicyGiven] | None = None,
    settings: Mapping[str, Any] | None = None,
    micro_batch_size: int | None = None,
    band: bool = True,
    on_progress: Callable[[str], object] = lambda what: None,
    **resources: Unpack[SearchOptions],
) -> BestPlan:
    """Search for the plan that is best in an objective.

    Args:
        lengths: prompt length of each request, in tokens; the planned batch may have fewer requests.
        policies: policies to search; by default all that one machine can run.
        settings: settings of the policies, by name; every policy in `policies` must take them.
        micro_batch_size: requests of a micro-batch; None to choose them.
        band: whether to find the uncertainty band of the best plan's figures.
        on_progress: called with the name of each stage of the search.

    Raises:
        DoesNotFit: no policy fits; the message names the memory and the missing bytes.
        BadInput: a policy that is named does not exist, or does not take the settings.
    """
    settings = settings or {}

    def setting_of(chosen: ChosenPolicy) -> Setting:
        return Setting(
            make=chosen.make,
            machine=machine,
            layout=layout,
            lengths=requests_for(objective, lengths),
            new_tokens=new_tokens,
            cost=cost_model(machine, layout.dtype),
            splits_kv=chosen.is_class and splits_kv(chosen.cls, machine),
            kv_on_gpu=chosen.make.keywords.get(KV_SHARE),
            objective=objective,
            **resources,
        )

    asked = _asked(policies, settings)
    sizes = None if micro_batch_size is None else [micro_batch_size]

    def first_trial(name: str, setting: Setting) -> tuple[Candidate, Schedule]:
        on_progress(f"bound and schedule of {name}")
        candidate = Candidate(name, setting, sizes)
        return candidate, candidate.search() if len(asked) == 1 else candidate.first_trial()

    found, misfits = _each(asked, settings, setting_of, first_trial, named=policies is not None)
    return _best_of(dict(found), [each.row() for each in misfits], band, on_progress)


class PolicyEstimate(NamedTuple):
    """A policy's tokens per second, estimated by simulating all requests in one batch; 0 if not all of them fit."""

    policy: str
    throughput: float


def fastest_policies(
    setting: Setting, sizes: Sequence[int], on_progress: Callable[[str], object] = lambda what: None
) -> list[PolicyEstimate]:
    """Estimate the throughput of each policy that can run on one machine; the fastest comes first.

    If the policy `FIRST` is nearly as fast as the fastest, it comes first. An estimate simulates a few layers of a
    schedule of all requests. `plan_best` searches for sizes as well, and takes several times as long.

    Args:
        setting: a setting with the prompt lengths of the batch; its policy does not matter.
        sizes: sizes of micro-batches, in requests; the first one that fits is simulated.
        on_progress: called with the name of each stage.

    Raises:
        DoesNotFit: not even one request fits with any policy; the message names the memory and the missing bytes.
    """

    def setting_of(chosen: ChosenPolicy) -> Setting:
        split = chosen.is_class and splits_kv(chosen.cls, setting.machine)
        return replace(setting, make=chosen.make, splits_kv=split, kv_on_gpu=None)

    def estimate(name: str, its_setting: Setting) -> PolicyEstimate:
        on_progress(f"first look at {name}")
        fitting = with_room(its_setting)
        schedules = (first_schedule(fitting, size) for size in sizes)
        return PolicyEstimate(name, next((one.throughput for one in schedules if one is not None), 0.0))

    estimates, misfits = _each(plannable(), {}, setting_of, estimate)
    if not estimates:
        raise _nothing_fits(in_order([], [each.row() for each in misfits]))
    return sorted(
        estimates, key=lambda each: each.throughput * (TIE if each.policy == FIRST else 1), reverse=True
    )


def _each(
    asked: Sequence[PolicyGiven],
    settings: Mapping[str, Any],
    setting_of: Callable[[ChosenPolicy], Setting],
    act: Callable[[str, Setting], Found],
    *,
    named: bool = False,
) -> tuple[list[Found], list[Misfit]]:
    """Call `act` for each policy, with the policy's name and the planner's `Setting` for it.

    Args:
        asked: the policies.
        settings: arguments of the policies, by name.
        setting_of: a function from a policy to its `Setting`.
        act: a function from a policy's name and `Setting` to a result; it raises BadInput if the policy does not fit.
        named: whether the user named the policies. If so, an error is raised unless it says that a plan does not fit;
            if not, a policy that cannot be made, or an installed plug-in that fails, counts as a misfit, too.

    Returns:
        The results for the policies that fit, and the policies that do not fit.
    """
    found: list[Found] = []
    misfits: list[Misfit] = []
    for given in asked:
        name = plugins.name_of("policies", given)
        try:
            chosen = choose_policy(given, settings)
        except BadInput as error:
            if named:
                raise
            misfits.append(misfit(name, None, error))
            continue
        setting = setting_of(chosen)
        try:
            with no_garbage_collection():
                found.append(act(name, setting))
        except Exception as error:  # an installed plug-in may raise anything
            if not isinstance(error, BadInput) and (named or name in plugins.shipped_policies()):
                raise
            misfits.append(misfit(name, setting, error))
    return found, misfits


def _asked(policies: Iterable[PolicyGiven] | None, settings: Mapping[str, Any]) -> Sequence[PolicyGiven]:
    """Return the policies to search; if `policies` is None, all policies that one machine can run.

    Raises:
        BadInput: settings are given, but not the policy that they are for.
    """
    if policies is not None:
        return list(policies)
    require_one_policy(settings)
    return plannable()


def require_one_policy(settings: Mapping[str, Any] | None) -> None:
    """Raise BadInput if `settings` of a policy are given, although the planner chooses the policy."""
    if settings:
        raise BadInput(
            f"settings such as {next(iter(settings))} are those of one policy: name it with --policy"
        )


def _best_of(
    schedules: dict[Candidate, Schedule],
    misfits: Sequence[Ranked],
    band: bool,
    on_progress: Callable[[str], object],
) -> BestPlan:
    """Find the best plan among several candidates.

    Args:
        schedules: the first schedule of each candidate; better schedules replace them.
        misfits: rows of policies that do not fit, for the ranking.
        band: whether to find the uncertainty band of the best plan's figures.
        on_progress: called with the name of each stage.
    """
    if not schedules:
        raise _nothing_fits(in_order([], misfits))
    if len(schedules) > 1:
        _search_sizes(schedules, on_progress)
    _deepen(schedules, on_progress)
    best = _winner(schedules)
    sizes = schedules[best]
    on_progress("gain from more of each resource")
    rows = [(one.rate, ranked(candidate, one)) for candidate, one in schedules.items()]
    gained = gains(best, sizes)
    if band:
        on_progress("the band of the figures")
    return BestPlan(
        policy=best.name,
        schedule=sizes,
        attention_on_gpu=best.traits.attention_on_gpu,
        ffn_on_gpu=best.traits.ffn_on_gpu,
        bound_by=max(sizes.trial_run.utilization, key=sizes.trial_run.utilization.__getitem__),
        gains=gained,
        ranking=in_order(rows, misfits),
        uncertainty=best.schedules.uncertainty(sizes) if band else None,
    )


def _search_sizes(schedules: dict[Candidate, Schedule], on_progress: Callable[[str], object]) -> None:
    """Replace the schedules of promising policies by better ones, the best policy first.

    The search ends after `MOST_TASKS` simulated tasks.

    Args:
        on_progress: called with the name of each stage.
    """
    firsts: dict[float, Candidate] = {}
    ahead = sorted(schedules, key=lambda each: schedules[each].rate, reverse=True)
    before = sum(each.schedules.tasks for each in ahead)
    for candidate in ahead:
        first, most = schedules[candidate].rate, max(one.rate for one in schedules.values())
        if first < PROMISING * most or sum(each.schedules.tasks for each in ahead) - before > MOST_TASKS:
            break
        twin = firsts.setdefault(first, candidate)
        if twin is candidate:
            on_progress(f"schedules of {candidate.name}")
            with no_garbage_collection():
                schedules[candidate] = candidate.search()
        else:  # the same schedule by another name
            schedules[candidate] = replace(schedules[twin], few=schedules[candidate].few)
            candidate.choice = twin.choice


def _deepen(schedules: dict[Candidate, Schedule], on_progress: Callable[[str], object]) -> None:
    """Simulate all layers of the best policy and of some others, the fastest first; replace their schedules.

    A policy that is about as fast as the best one in a few layers is simulated if it has at most `MOST_DEEP_TASKS`
    tasks. Slower policies are simulated as long as they have at most `MOST_FAR_TASKS` tasks together; a policy that
    would exceed this total is passed over.

    Args:
        on_progress: called with the name of each stage.
    """
    deepened: dict[float, Schedule] = {}
    tasks_left = float(MOST_FAR_TASKS)

    def deepen(candidate: Candidate) -> None:
        few = schedules[candidate]
        if few.rate in deepened:  # the same schedule by another name
            schedules[candidate] = replace(deepened[few.rate], few=few.few)
            return
        on_progress(f"all layers of {candidate.name}")
        with no_garbage_collection():
            schedules[candidate] = candidate.schedules.deepened(candidate.in_chunks(few))
        deepened[few.rate] = schedules[candidate]

    for candidate in sorted(schedules, key=lambda each: schedules[each].rate, reverse=True):
        few, most = schedules[candidate], max(one.rate for one in schedules.values())
        tasks = few.tasks_of_all_layers
        near = few.rate * close(candidate.setting.objective) >= most and tasks <= MOST_DEEP_TASKS
        if few.whole or near or few.rate in deepened:
            deepen(candidate)
        elif tasks <= tasks_left:
            tasks_left -= tasks
            deepen(candidate)
    while not schedules[_winner(schedules)].whole:
        deepen(_winner(schedules))


def _winner(schedules: Mapping[Candidate, Schedule]) -> Candidate:
    """Return the candidate with the highest rate; of equal rates, the first candidate."""
    return max(schedules, key=lambda candidate: schedules[candidate].rate)


def _needs_others(name: str) -> bool:
    """Test whether a policy divides experts among several machines, so that one machine alone cannot run it."""
    try:
        return is_expert_parallel(plugins.find("policies", name))
    except BadInput:
        return False


def _nothing_fits(ranking: list[Ranked]) -> DoesNotFit:
    """Return the error that no policy fits; its message names the policy that lacks the fewest bytes."""
    least = next((row for row in ranking if row.missing), None)
    if least is None:
        return DoesNotFit("; ".join(dict.fromkeys(row.why or "" for row in ranking)), ranking)
    enough = least.lacks.removesuffix(" would")
    return DoesNotFit(f"{least.why}; {least.policy} would fit with {enough}", ranking)

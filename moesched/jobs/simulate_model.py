"""`simulate_model`: predicts a workload under a policy on the virtual clock, in successive batches."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from moesched.analysis.helps import Help
from moesched.drivers.capture import NotFixed
from moesched.errors import BadInput
from moesched.jobs.bands import with_band
from moesched.jobs.batch_reports import BatchReports, JobEnding, reported
from moesched.jobs.explained import explained
from moesched.jobs.job import Job
from moesched.jobs.options import SimulationOptions
from moesched.jobs.planners_choice import with_best_plan, with_choice
from moesched.jobs.report import JobReport, job_report
from moesched.jobs.scenario import Scenario, find_scenario
from moesched.jobs.trace_file import (
    BatchFiles,
    about_of,
    batch_files,
    recorder_for,
    require_outputs_apart,
    roofs_of,
    write_recording,
)
from moesched.keywords import takes
from moesched.models.config import ModelConfig
from moesched.planner.proposal import MOST_REQUESTS
from moesched.planner.rivals import faster_policy
from moesched.requests.batch import Batch
from moesched.requests.batching import batches_of
from moesched.requests.workloads import Workload
from moesched.routing import SeededRouting
from moesched.routing.choices import BatchRouting
from moesched.routing.trace import RecordedChoices
from moesched.runs.batch_policies import BatchPolicies
from moesched.runs.cell_progress import listener_or_cell
from moesched.runs.decisions import rows_of_experts
from moesched.runs.listeners import KindMeter, Listener
from moesched.runs.ranks import Rank
from moesched.runs.simulation import simulate
from moesched.seams import Routing, keeps_state
from moesched.steps.contention import lanes_contend
from moesched.system.cells import PATIENCE_SECONDS
from moesched.system.logs import Log
from moesched.system.own_loop import interruptible

OTHER_LENGTHS = "lower --gen, or choose another workload"
"""Remedy for requests of a workload that are longer than the model's context."""

_log = Log(__name__)


@takes(SimulationOptions)
@interruptible()
def simulate_model(given: SimulationOptions) -> JobReport:
    """Predict a workload on the virtual clock; needs no weights and no GPU.

    Raises:
        BadInput: an argument cannot be used.
        NotTraced: the trace could not be written; the error has the report.
        PolicyError: the policy submitted something illegal; it is raised at the policy's line.
    """
    require_outputs_apart(given)
    given = replace(given, listener=listener_or_cell(given.listener, patience=PATIENCE_SECONDS))
    return simulate_scenario(find_scenario(given), given)


def simulate_scenario(scenario: Scenario, given: SimulationOptions) -> JobReport:
    """Predict a workload as `simulate_model` does, for a scenario that was found from these options.

    Raises:
        BadInput, NotTraced, PolicyError: as `simulate_model`.
    """
    config, choices = scenario.config, scenario.choices
    new_tokens = scenario.given_workload().new_tokens[0] if given.gen is None else given.gen
    lengths, all_run = _lengths(scenario.given_workload(), given)
    require_context(lengths, new_tokens, config)
    job = _job(scenario, given, lengths, new_tokens, all_run=all_run)
    sizes = job.sizes(lengths, new_tokens, successive=all_run)
    batches = list(batches_of(lengths, new_tokens, sizes))[: None if all_run else 1]
    reports, policies = BatchReports(), job.policies()
    for number, batch in enumerate(batches):
        routing: Routing = SeededRouting(
            job.layout.config.routed.experts, job.layout.config.routed.top_k, given.seed
        )
        if choices is not None:
            routing = BatchRouting(choices, batch)
        with suppress(KeyboardInterrupt):
            reports.add(_simulate_batch, job, given, batch, policies, routing, batch_files(given, number))
        if reports.ended_early(number):
            break
    report = reports.merge(requests=len(lengths), batches=len(batches), padded=given.padded)
    _tell_unused(scenario, given, report)
    if not given.band:
        return report
    listener = given.listener or Listener()
    report = with_band(report, partial(_ranks, job, batches[0]), listener.estimating)
    listener.ran()
    return report


def _job(
    scenario: Scenario, given: SimulationOptions, lengths: Sequence[int], new_tokens: int, *, all_run: bool
) -> Job:
    """Return the job with the policy that the options name, or the planner's choice if they name none.

    all_run: whether all requests run, in successive batches; otherwise only those that fill one batch.
    """
    job = Job(given, scenario.config, scenario.machine, beams=given.beams, nodes=given.nodes or 1)
    listener = given.listener or Listener()
    if not job.chooses:
        job.use_process()
        return job
    if all_run or given.batch_size is not None:
        return with_choice(job, lengths, new_tokens, listener)
    return with_best_plan(job, lengths, new_tokens, listener)


def _tell_unused(scenario: Scenario, given: SimulationOptions, report: JobReport) -> None:
    """Warn if a routing trace has tokens that the simulation did not use."""
    if not isinstance(scenario.choices, RecordedChoices):
        return
    lengths, all_run = _lengths(scenario.given_workload(), given)
    ran = lengths if all_run else lengths[: report.plan.batch_size]
    routed = [length + report.plan.new_tokens - 1 for length in ran]
    if unused := scenario.choices.unused(routed):
        _log.warning(
            "the routing trace is longer than the run",
            routing=given.routing if isinstance(given.routing, str) else "that was given",
            trace_tokens=scenario.choices.tokens,
            unused_tokens=unused,
            remedy="give longer prompts, more requests or a larger --gen",
        )


def _ranks(job: Job, batch: Batch) -> list[Rank]:
    """Return a plan and a policy of a batch for each node."""
    return [Rank(*job.plan(batch, node)) for node in range(job.nodes)]


def _lengths(workload: Workload, given: SimulationOptions) -> tuple[list[int], bool]:
    """Return the prompt length of each request in tokens, and whether all of these requests run.

    All run if the options or the workload give the number of requests. Otherwise only the first ones run, as many as
    fill one batch.
    """
    listed = given.requests or len(workload.prompt_tokens)
    count = listed or given.batch_size or MOST_REQUESTS
    lengths = [workload.longest] * count if given.padded else workload.lengths(count, given.seed)
    return list(lengths), bool(listed)


def _simulate_batch(
    job: Job,
    given: SimulationOptions,
    batch: Batch,
    policies: BatchPolicies,
    routing: Routing,
    files: BatchFiles,
) -> JobReport:
    if not keeps_state(job.policy_class):
        with suppress(NotFixed):
            return _simulate(job, given, batch, policies, routing, files, replay=True)
    return _simulate(job, given, batch, policies, routing, files, replay=False)


def _simulate(
    job: Job,
    given: SimulationOptions,
    batch: Batch,
    policies: BatchPolicies,
    routing: Routing,
    files: BatchFiles,
    *,
    replay: bool,
) -> JobReport:
    listener = given.listener or Listener()
    plan, policy = job.plan(batch, policy=policies.next_of(0))
    if replay and (lanes_contend(plan) or plan.nodes.count > 1 or rows_of_experts(routing) is not None):
        raise NotFixed  # durations depend on concurrent tasks, on which node runs the experts, or on the experts
    peers = [Rank(*job.plan(batch, node, policies.next_of(node))) for node in range(1, job.nodes)]
    listener.planned(plan)
    explains = given.explained and not batch.first_request
    recorder = recorder_for(plan, files, explained=explains)
    kinds = KindMeter()
    ending = JobEnding()
    report = reported(
        partial(
            simulate,
            plan,
            policy,
            routing=routing,
            preview_accuracy=given.preview_accuracy,
            replay=replay,
            observers=[listener, kinds],
            recorder=recorder,
            peers=peers,
        ),
        ending,
    )
    listener.ran()
    finished = job_report(
        report,
        plan,
        kinds,
        policy=job.policy_name,
        chosen_at=job.chosen_at,
        dtype=job.layout.dtype,
        trace=files.trace,
    )
    if recorder is not None:
        roofs = roofs_of(plan.machine, finished.dtype)
        recording, explanation = recorder.recording(), None
        if explains:
            drawn = isinstance(routing, SeededRouting)
            others = partial(_another_policy, finished, job, batch) if drawn else tuple
            finished, explanation = explained(finished, recording, about_of(finished), others)
        write_recording(files, recording, finished, listener, roofs=roofs, explanation=explanation)
    ending.raise_error(finished)
    return finished


def require_context(
    lengths: Sequence[int], new_tokens: int, config: ModelConfig, remedy: str = OTHER_LENGTHS
) -> None:
    """Raise BadInput if the longest of the prompt `lengths` and the new tokens exceed the model's context."""
    longest = max(lengths)
    if longest + new_tokens > config.max_positions:
        raise BadInput(
            f"a prompt of {longest} tokens and {new_tokens} new ones are more than the context of {config.name}, "
            f"{config.max_positions}: {remedy}"
        )


def _another_policy(report: JobReport, job: Job, batch: Batch) -> list[Help]:
    """Find a policy that would be much faster for a simulated batch; empty if there is none.

    There is none for beam search or several nodes, which the planner's quick search does not cover.
    """
    if job.beams > 1 or job.nodes > 1:
        return []
    rate = report.throughput_tokens_per_second
    rival = faster_policy(job.setting(batch.prompts, batch.new_tokens), report.policy, rate)
    if rival is None:
        return []
    sizes = f"--batch-size {rival.schedule.batch_size} --micro-batch-size {rival.schedule.micro_batch_size}"
    return [
        Help(
            change=f"The policy {rival.policy} instead of {report.policy}",
            command=f"simulate ... --policy {rival.policy} {sizes}",
            saved=1 - rate / rival.schedule.throughput,
        )
    ]

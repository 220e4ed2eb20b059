"""Runs on the virtual clock: a plan's policy is simulated or replayed, and the run's report is returned."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

from moesched.drivers.capture import CapturingEngine
from moesched.drivers.replay import ReplayObserver, replay_run
from moesched.errors import BadInput
from moesched.inputs.defaults import PREVIEW_ACCURACY
from moesched.machines.cost import cost_model
from moesched.machines.cost_model import CostModel
from moesched.runs.assembly import assemble
from moesched.runs.decisions import rows_of_experts, simulated_decisions
from moesched.runs.ending import Ending
from moesched.runs.outcome import Outcome, Report, make_report
from moesched.runs.ranks import Rank
from moesched.runs.virtual_run import VirtualRun
from moesched.runs.watched import observers_of
from moesched.seams import Observer, Policy, Routing
from moesched.steps.contention import lanes_contend
from moesched.steps.plan import Plan
from moesched.tasks import Join
from moesched.trace import LastSteps, Recorder


def simulate(
    plan: Plan,
    policy: Policy,
    *,
    cost: CostModel | None = None,
    routing: Routing | None = None,
    preview_accuracy: float = PREVIEW_ACCURACY,
    sharing: bool | None = None,
    replay: bool = False,
    observers: Sequence[Observer] = (),
    recorder: Recorder | LastSteps | None = None,
    peers: Sequence[Rank] = (),
) -> Report:
    """Run a plan on the virtual clock.

    Args:
        cost: gives the time of tasks; by default the measured costs of the plan's machine, else its roofline.
        routing: the experts that tokens choose; by default uniform, with seed 0.
        preview_accuracy: probability (0 to 1) that `Step.preview_route` forecasts an expert which the routing chooses
            in the next layer; n layers ahead, it is this number to the power of n.
        sharing: whether concurrent tasks slow each other down; by default, they do if lanes share a memory.
        replay: whether to have the policy schedule a few steps only, and repeat their graph of tasks for the others.
            This is several times faster, and gives the same times to the nanosecond.
        observers: called with each task of the first node, when it ends.
        recorder: records the tasks of all nodes, for a trace; None for no trace.
        peers: the other nodes, if several run one model; `plan` and `policy` are the first node's. Observers and report
            cover the first node only, except that each memory's peak is the highest of all nodes.

    Raises:
        BadInput: `replay` is set, and there are several nodes, or durations depend on concurrent tasks or the routing.
        NotFixed: `replay` is set, and the policy awaits a handle, or fails. The plan cannot be run again: make a
            new one.
    """
    started = time.perf_counter()
    ranks = [Rank(plan, policy), *peers]
    ending = Ending()
    chosen = rows_of_experts(routing)
    if replay:
        if plan.nodes.count > 1:
            raise BadInput(f"replay needs one node, and the plan has {plan.nodes.count}: give replay=False")
        if chosen is not None:
            raise BadInput(
                "replay needs fixed durations, and with a routing they depend on the experts that tokens choose: "
                "give replay=False"
            )
        if (lanes_contend(plan) if sharing is None else sharing) or plan.machine.wired_memory is not None:
            raise BadInput(
                "replay needs fixed durations, and with sharing they depend on concurrent tasks: give sharing=False"
            )
        outcome = _replay(ranks[0], cost, observers, recorder)
    else:
        virtual = VirtualRun(
            ranks,
            cost=cost,
            decisions=simulated_decisions(plan, routing, preview_accuracy),
            sharing=sharing,
            observers=observers,
            recorder=recorder,
            chosen=chosen,
        )
        with ending:
            virtual.run()
        outcome = virtual.rank_runs[0].outcome()
    report = _report(ranks, outcome, time.perf_counter() - started, ending)
    ending.raise_error(report)
    return report


def _report(ranks: Sequence[Rank], outcome: Outcome, seconds: float, ending: Ending) -> Report:
    return make_report(
        ranks[0].plan,
        ranks[0].policy,
        outcome,
        seconds,
        measured=False,
        interrupted=ending.interrupted,
        failure=ending.failure,
        peers=[each.plan for each in ranks[1:]],
    )


def _replay(
    rank: Rank, cost: CostModel | None, observers: Sequence[Observer], recorder: Recorder | LastSteps | None
) -> Outcome:
    plan = rank.plan
    run = assemble(rank, CapturingEngine)
    observers = observers_of([run], observers, recorder)
    with closing(run.run_state):
        replayed = replay_run(run.run_state, rank.policy, cost or cost_model(plan.machine, plan.layout.dtype))
    if run.engine.awaits is not None:
        run.engine.awaits += replayed.awaits()
    for observer in observers:
        if isinstance(observer, ReplayObserver):
            observer.replayed(replayed)
        else:
            for task in replayed.tasks():
                if not isinstance(task, Join):  # it does not run
                    observer.ended(task)
    ends = replayed.step_ends()
    return Outcome(
        loaded=ends[0],
        step_ends=ends[1:],
        tokens=[[0] * len(ends[1:]) for _ in plan.batch.prompts],
        busy=replayed.busy(run.engine.lanes),
        tasks=replayed.count,
        first_tokens={
            request: end
            for number, end in replayed.samples(1).items()
            for request in plan.chunks[number].ends
        },
        sampled=[replayed.samples(index) for index in range(2, len(replayed.steps))],
        scheduled=replayed.captured,
    )

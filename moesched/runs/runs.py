"""Runs: one batch through one policy, on hardware or on the virtual clock, from names to a report.

Everything the command line does is a few calls of this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import anyio

from moesched.drivers.lanes import LaneKind
from moesched.drivers.realtime import RealtimeDriver
from moesched.drivers.replay import CapturingEngine, ReplayObserver, replay_run
from moesched.drivers.validation import new_engine, new_shared_engine, watching
from moesched.drivers.virtual import VirtualDriver
from moesched.drivers.wired_memory import wired_memory_delays
from moesched.engine import Engine
from moesched.errors import BadInput, NotFinite, OverBudget, TaskFailed, TransportError
from moesched.machines import INTERCONNECT, Machine
from moesched.machines.cost import cost_model
from moesched.machines.group import numbered
from moesched.machines.networks import NETWORK
from moesched.models.layout import Page, WeightLayout
from moesched.requests.batch import Batch
from moesched.requests.beams import Standing
from moesched.requests.sampling import Sampling
from moesched.routing import SeededRouting
from moesched.routing.router_forecast import PREVIEW_ACCURACY, RouterForecast
from moesched.runs.generation import Generation, OnTokens
from moesched.runs.outcome import Outcome, Report, make_report
from moesched.runs.ranks import OfLanes, OnDevices, Rank
from moesched.seams import CostModel, Observer, Policy, Routing
from moesched.steps.plan import Plan
from moesched.steps.run_state import RunState
from moesched.tasks import Decision, Lane, Task
from moesched.trace import LastSteps, Recorder


def plan_run(
    machine: Machine,
    layout: WeightLayout,
    batch: Batch,
    policy: Policy,
    budgets: Mapping[str, int] | None = None,
    slot_bytes: Callable[[Page], int] | None = None,
    nodes: int = 1,
    node: int = 0,
) -> Plan:
    """Have a policy plan a batch, for one node of several where they share the experts.

    Raises:
        BadInput: the plan does not fit a budget; the message says by how many bytes, of what. The policy or the machine
            is not for several nodes.
    """
    name = type(policy).__name__
    if nodes > 1:
        _require_node(machine, layout, policy, nodes)
    try:
        plan = Plan(machine, layout, batch, budgets, slot_bytes, nodes, node)
        policy.plan(plan)
        plan.check()
    except OverBudget as error:
        remedy = "raise --budget, or lower --batch-size or --max-new-tokens"
        each = f", on each of {layout.config.ranks} accelerators" if layout.config.ranks > 1 else ""
        if nodes > 1:
            each = f", on node {node} of {nodes}"
        raise BadInput(f"policy {name} does not fit: {error}{each}: {remedy}") from error
    return plan


def _require_node(machine: Machine, layout: WeightLayout, policy: Policy, nodes: int) -> None:
    if not getattr(type(policy), "expert_parallel", False):
        raise BadInput(
            f"policy {type(policy).__name__} does not share experts among {nodes} nodes: choose one that does, "
            "such as ep_balanced, or 1 node"
        )
    if layout.config.ranks > 1:
        raise BadInput(
            f"a node of {nodes} uses one accelerator, and machine {machine.name} is to use {layout.config.ranks}: "
            "use --tensor-parallel 1"
        )


def make_lanes(plan: Plan, kinds: Mapping[str, LaneKind] | None = None) -> dict[str, Lane]:
    """The lanes of the plan's machine, by name: one for each processor's role, one for each path between memories.

    Each stage of a pipeline has an accelerator of its own: "accelerator", "accelerator 1", ... Ranks have one lane
    more, for their all-reduces. Nodes have one for their exchanges, which go in the same order on all of them.
    Those that are streams, of one device, share a domain.
    """
    accelerators = [numbered("accelerator", stage) for stage in range(len(plan.stages))]
    names = [*accelerators, "host", *dict.fromkeys(link.lane for link in plan.machine.links)]
    if plan.ranks > 1:
        names.append(INTERCONNECT)
    kinds = kinds or {}
    lanes = {
        name: Lane(name, plan.discipline, domain="device" if kinds.get(name) == "stream" else None)
        for name in names
    }
    if plan.nodes > 1:
        lanes[NETWORK] = Lane(NETWORK, "in_order")
    return lanes


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
        cost: by default what the plan's machine was calibrated to, or its roofline.
        routing: by default uniform, with seed 0.
        preview_accuracy: how likely `Step.preview_route` foretells an expert that the routing will choose.
        sharing: whether tasks that run at once slow each other down; by default where lanes share a memory.
        replay: build the graph of a few steps only and replay it: several times faster, the same to the nanosecond.
        recorder: keeps the tasks, for a trace.
        peers: the other nodes, where several work on one model; plan and policy are those of the first. What is told
            and reported is what the first one did, but for the trace and the memories, of which the fullest counts.

    Raises:
        NotFixed: `replay` was asked for, and the policy awaits a handle. The plan is used up then: make a new one.
    """
    started = time.perf_counter()
    cost = cost or cost_model(plan.machine, plan.layout.dtype)
    sharing = plan.contended if sharing is None else sharing
    if replay:
        if sharing or plan.machine.wired_memory is not None:
            raise BadInput("replay does not go with sharing: durations would depend on what else runs")
        outcome = _replay(plan, policy, cost, observers, recorder)
    else:
        config = plan.layout.config
        routing = routing or SeededRouting(config.experts, config.top_k)
        previews = RouterForecast(routing, config.experts, preview_accuracy)
        decisions = simulated_decisions(plan, routing, previews)
        ranks = [Rank(plan, policy), *peers]
        outcome = _simulate(ranks, cost, decisions, sharing, observers, recorder)
    return make_report(
        plan, policy, outcome, time.perf_counter() - started, measured=False, peers=_plans(peers)
    )


def _plans(ranks: Sequence[Rank]) -> list[Plan]:
    return [rank.plan for rank in ranks]


def _simulate(
    ranks: Sequence[Rank],
    cost: CostModel,
    decisions: Callable[[Task], Any],
    sharing: bool,
    observers: Sequence[Observer],
    recorder: Recorder | LastSteps | None,
) -> Outcome:
    lanes = [make_lanes(rank.plan) for rank in ranks]
    engines = [new_engine(own.values()) for own in lanes]
    observers = _with_recorder(observers, recorder, engines, ranks)
    perform: dict[type[Task], Callable[[Task], Any]] = {Decision: decisions}
    delays = {
        lane: delay
        for rank, own in zip(ranks, lanes, strict=True)
        for lane, delay in wired_memory_delays(rank.plan, own).items()
    }
    driver = VirtualDriver(
        engines, cost, sharing=sharing, perform=perform, observers=observers, delays=delays
    )
    with ExitStack() as opened:
        generations = []
        for rank, engine, own in zip(ranks, engines, lanes, strict=True):
            run_state = opened.enter_context(closing(RunState(rank.plan, engine, own)))
            opened.enter_context(watching(run_state))
            generations.append(Generation(run_state, rank.policy))
        driver.run(*(generation.run() for generation in generations))
    return _outcome(generations[0], engines[0])


def _replay(
    plan: Plan,
    policy: Policy,
    cost: CostModel,
    observers: Sequence[Observer],
    recorder: Recorder | LastSteps | None,
) -> Outcome:
    lanes = make_lanes(plan)
    engine = CapturingEngine(lanes.values())
    observers = _with_recorder(observers, recorder, [engine], [Rank(plan, policy)])
    with closing(RunState(plan, engine, lanes)) as run_state:
        timeline = replay_run(run_state, policy, cost)
    if engine.awaits is not None:
        engine.awaits += timeline.awaits()
    for observer in observers:
        if isinstance(observer, ReplayObserver):
            observer.replayed(timeline)
        else:
            for task in timeline.tasks():
                observer.ended(task)
    ends = timeline.step_ends()
    return Outcome(
        loaded=ends[0],
        step_ends=ends[1:],
        tokens=[[0] * len(ends[1:]) for _ in plan.batch.prompts],
        busy=timeline.busy(engine.lanes),
        tasks=timeline.count,
        first_tokens={
            request: end
            for number, end in timeline.prefill_samples().items()
            for request in plan.chunks[number].ends
        },
    )


def _outcome(generation: Generation, engine: Engine) -> Outcome:
    return Outcome(
        loaded=generation.loaded,
        step_ends=generation.step_ends,
        tokens=generation.tokens,
        scores=generation.scores,
        busy={lane.name: lane.busy - generation.busy_loading.get(lane.name, 0) for lane in engine.lanes},
        tasks=engine.submitted - engine.joins,
        first_tokens=generation.first_tokens,
    )


def run(
    plan: Plan,
    policy: Policy,
    device: Any,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling | None = None,
    stop_tokens: Sequence[int] = (),
    on_tokens: OnTokens | None = None,
    observers: Sequence[Observer] = (),
    recorder: Recorder | LastSteps | None = None,
    peers: Sequence[Rank] = (),
    keep_open: bool = False,
) -> Report:
    """Run a plan on real hardware. Ctrl-C ends it cleanly; the report then holds the tokens so far.

    So it does where logits are no numbers, and where this is one node of a cluster that no longer reaches the others:
    `failure` of the report then says where the bad numbers began, or which node is gone.

    Args:
        peers: the other ranks or nodes, where several in this process work on one model; plan, policy and device are
            those of the first. What is told and reported is what the first one did, but for the trace.
        keep_open: leave the device open for another batch; whoever asks for that closes it.

    Raises:
        BadInput: the plan is a pipeline, which no device runs.
    """
    if len(plan.stages) > 1:
        raise BadInput(
            f"policy {type(policy).__name__} makes a pipeline of {len(plan.stages)} accelerators, and devices run "
            f"one: give --machine with one accelerator instead of {plan.machine.name}, or use `moesched simulate`"
        )
    started = time.perf_counter()
    ranks = [Rank(plan, policy, device), *peers]
    lanes = [make_lanes(each.plan, each.device.kinds) for each in ranks]
    engines = [new_shared_engine(own.values()) for own in lanes]
    observers = _with_recorder(observers, recorder, engines, ranks)
    run_states = [
        RunState(each.plan, engine, own) for each, engine, own in zip(ranks, engines, lanes, strict=True)
    ]
    generations = [
        Generation(run_state, each.policy, stop_tokens=stop_tokens, on_tokens=None if number else on_tokens)
        for number, (run_state, each) in enumerate(zip(run_states, ranks, strict=True))
    ]
    tasks = OnDevices(ranks, [own.values() for own in lanes]) if peers else None
    driver = RealtimeDriver(
        engines,
        tasks.execute if tasks else device.execute,
        kinds={NETWORK: "guest", **device.kinds},
        streams=tasks or device.streams,
        observers=observers,
        clock=getattr(device, "clock", time.perf_counter_ns),
    )

    async def main() -> None:
        try:
            for each in reversed(ranks):  # here, so that Ctrl-C waits for it
                each.device.begin(each.plan, prompts, sampling or Sampling())
            with ExitStack() as watched:
                for run_state in run_states:
                    watched.enter_context(watching(run_state))
                await driver.run(*(generation.run() for generation in generations))
        finally:
            for run_state in run_states:
                run_state.close()
            if not keep_open:
                for each in ranks:
                    await each.device.aclose()

    interrupted, failure = False, None
    try:
        anyio.run(main, backend_options={"use_uvloop": _has_uvloop()})
    except KeyboardInterrupt:
        interrupted = True
    except TaskFailed as error:
        lost = plan.nodes > 1 and not peers and isinstance(error.__cause__, TransportError)
        if not lost and not isinstance(error.__cause__, NotFinite):
            raise
        failure = str(error.__cause__)
    if recorder is not None:
        recorder.origin = driver.origin
    seconds = time.perf_counter() - started
    emulation = getattr(device, "emulation", None)
    return make_report(
        plan,
        policy,
        _outcome(generations[0], engines[0]),
        seconds,
        measured=True,
        interrupted=interrupted,
        failure=failure,
        emulation=None if emulation is None else emulation(),
        own_bytes=plan.ranks * getattr(device, "own_bytes", 0),
        peers=_plans(peers),
    )


def _with_recorder(
    observers: Sequence[Observer],
    recorder: Recorder | LastSteps | None,
    engines: Sequence[Engine],
    ranks: Sequence[Rank],
) -> Sequence[Observer]:
    """Observers of the first rank, and the recorder of all."""
    if len(ranks) > 1:
        observers = [OfLanes(observer, engines[0].lanes) for observer in observers]
    if recorder is None:
        return observers
    for engine, rank in zip(engines, ranks, strict=True):
        recorder.watch(engine, rank.plan.memories)
    return [*observers, recorder]


def simulated_decisions(
    plan: Plan, routing: Routing, previews: RouterForecast | None = None
) -> Callable[[Task], Any]:
    """What decisions come to where nothing is computed: routed experts, and tokens that nobody will read.

    previews: foretell the routing; by default as well as `RouterForecast` says.
    """
    batches = plan.batch.micro_batches
    previews = previews or RouterForecast(routing, plan.layout.config.experts)

    def perform(task: Task) -> Any:
        if task.verb == "route":
            return routing.choose(task.step, task.layer, task.micro_batch, task.work.tokens)
        if task.verb == "preview_route":
            return previews.choose(task.step, task.layer, task.micro_batch, task.work.tokens)
        requests = batches[task.micro_batch] if task.step else plan.chunks[task.micro_batch].ends
        if plan.batch.beams > 1:
            return [Standing((0,) * (task.step + 1), 0.0, done=False)] * len(requests)
        return [0] * len(requests)

    return perform


def _has_uvloop() -> bool:
    try:
        import uvloop  # noqa: F401  # only whether it is there: Windows has none
    except ImportError:
        return False
    return True

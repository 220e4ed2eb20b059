"""Serving of requests by either driver: simulated on the virtual clock, or run on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from moesched.drivers.lanes import Execute
from moesched.drivers.realtime import RealtimeDriver
from moesched.drivers.validation import new_engine, new_shared_engine
from moesched.engine import Engine
from moesched.errors import BadInput
from moesched.inputs.defaults import PREVIEW_ACCURACY
from moesched.machines.networks import NETWORK
from moesched.routing.served import ServedRouting
from moesched.runs.decisions import rows_of_experts, simulated_decisions
from moesched.runs.device_values import lane_kinds, value_checks
from moesched.runs.notices import NOTICE
from moesched.runs.out_of_memory import memory_refusals
from moesched.runs.ranks import OnDevices, Rank, clock_of
from moesched.runs.served_parts import (
    ServedRun,
    ServingSetup,
    first_node,
    other_node,
    require_one_accelerator,
)
from moesched.runs.serving import ARRIVALS, Serving
from moesched.runs.virtual_run import Perform, decided, virtual_driver
from moesched.runs.watched import closed_at_end, observers_of
from moesched.seams import (
    Device,
    JoinsRanks,
    LaneKind,
    Observer,
    Policy,
    Routing,
    Serves,
    Transport,
)
from moesched.steps.plan import Plan
from moesched.system.own_loop import run_on_own_loop
from moesched.tasks import Collective, Decision, HostKernel, Kernel, Lane, PageTransfer, Preview, Task
from moesched.trace import LastSteps, Recorder
from moesched.trace.recording import WAIT


def simulate_serving(
    setup: ServingSetup,
    *,
    routing: Routing | None = None,
    preview_accuracy: float = PREVIEW_ACCURACY,
    observers: Sequence[Observer] = (),
    recorder: Recorder | LastSteps | None = None,
    device: Device | None = None,
    peers: Sequence[Rank] = (),
    make_engine: Callable[[Iterable[Lane]], Engine] = new_engine,
) -> Serving:
    """Serve requests on the virtual clock, and return the outcome of each.

    Args:
        device: computes every task as it ends; by default nothing is computed.
        peers: the other nodes, if several share the model; `setup` has the first node's plan and policy.
        make_engine: makes an engine, given its lanes; by default an `Engine`, or a `CheckedEngine` if the
            environment variable MOESCHED_VALIDATE is set and not 0.
        routing, preview_accuracy, recorder: see `moesched.runs.simulation.simulate`.

    Raises:
        BadInput: the plan is for several accelerators or another number of nodes, or a request exceeds the capacity.
    """
    plan = setup.plan
    require_one_accelerator(plan, setup.policy, 1 + len(peers))
    followers = [other_node(each.plan, each.policy, make_engine) for each in peers]
    run = first_node(
        setup,
        make_engine,
        peers=[each.main.notices for each in followers],
        on_step=routing.begin if isinstance(routing, ServedRouting) else None,
        chosen=rows_of_experts(routing, by_step=True),
    )
    runs: list[ServedRun[Engine, Any]] = [run, *followers]
    ranks = [Rank(plan, setup.policy, device), *peers]
    if device is None:
        perform = decided(simulated_decisions(plan, routing, preview_accuracy, by_step=True))
    else:
        perform = _computed(ranks, runs)
    driver = virtual_driver(runs, perform, observers=observers, recorder=recorder)
    with closed_at_end(runs):
        driver.run(*(each.main.run() for each in runs))
    return run.main


def _computed(ranks: Sequence[Rank], runs: Sequence[ServedRun[Any, Any]]) -> dict[type[Task], Perform]:
    """Prepare the devices to serve; return, by type of task, a function that computes a task on its rank's device.

    The driver of the virtual clock calls such a function as the task ends. For a notice, by which the first node tells
    the others the requests and tokens of the next step, the function does nothing.
    """
    for rank in ranks:
        _serves(rank.device).serve(rank.plan)
    execute = OnDevices(ranks, [each.engine.lanes for each in runs]).execute

    def exchange(task: Task) -> Any:
        return None if task.verb == NOTICE else execute(task)

    computed: dict[type[Task], Perform] = dict.fromkeys(
        (Kernel, HostKernel, PageTransfer, Decision, Preview), execute
    )
    return computed | {Collective: exchange}


def serve_on(
    device: Device,
    setup: ServingSetup,
    *,
    observers: Sequence[Observer] = (),
    recorder: Recorder | LastSteps | None = None,
    transport: Transport | None = None,
) -> Serving:
    """Serve requests on a device until no more arrive, and return the outcome of each; the caller closes the device.

    Args:
        transport: connects this node to the others, which call `follow_on`; None for one node. The caller closes it.

    Raises:
        BadInput: the device or plan does not support continuous batching, or a request exceeds the capacity.
        OutOfMemory: the system refused memory.
        TaskFailed: another node is lost, or a task failed.
    """
    serves = _serves(device)
    _require_role(setup.plan, first=True)
    require_one_accelerator(setup.plan, setup.policy, 1 if transport is None else setup.plan.nodes.count)
    kinds: dict[str, LaneKind] = {**lane_kinds(device), ARRIVALS: "awaitable"}
    run = first_node(setup, new_shared_engine, kinds, device=type(device).__name__)
    beside: dict[str, Execute] = {WAIT: lambda _: run.main.wait_for_news()}
    if transport is not None and run.main.notices is not None:
        _join(device, setup.plan, transport)
        beside[NOTICE] = partial(run.main.notices.carry, transport)
    driver = RealtimeDriver(
        [run.engine],
        partial(_execute, device, beside),
        kinds={NETWORK: "guest", **kinds},
        streams=device.streams,
        observers=observers_of([run], observers, recorder),
        checks=value_checks(device, setup.plan),
        clock=clock_of(device),
    )
    with closed_at_end([run]), memory_refusals(setup.plan):
        serves.serve(setup.plan)
        run_on_own_loop(partial(driver.run, run.main.run()))
    if recorder is not None:
        recorder.origin = driver.origin
    return run.main


def follow_on(device: Device, plan: Plan, policy: Policy, transport: Transport) -> int:
    """Serve as a node other than the first, until no more requests arrive; the caller closes the device.

    Returns:
        the number of steps.

    Raises:
        BadInput: the device cannot serve, or cannot be one of several nodes; or the plan is the first node's.
        TaskFailed: another node is lost, or a task failed.
    """
    serves = _serves(device)
    _require_role(plan, first=False)
    kinds = lane_kinds(device)
    run = other_node(plan, policy, new_shared_engine, kinds)
    _join(device, plan, transport)
    driver = RealtimeDriver(
        [run.engine],
        partial(_execute, device, {NOTICE: partial(run.main.notices.carry, transport)}),
        kinds={NETWORK: "guest", **kinds},
        streams=device.streams,
        checks=value_checks(device, plan),
        clock=clock_of(device),
    )
    with closed_at_end([run]):
        serves.serve(plan)
        run_on_own_loop(partial(driver.run, run.main.run()))
    return run.main.steps


def _require_role(plan: Plan, *, first: bool) -> None:
    if (plan.nodes.index == 0) != first:
        raise BadInput(
            f"the plan is that of node {plan.nodes.index} of {plan.nodes.count}: node 0 calls serve_on, the others "
            "follow_on"
        )


def _execute(device: Device, beside: Mapping[str, Execute], task: Task) -> Any:
    """Run a task, and return its value; for a task on a lane of kind "awaitable", return an awaitable of the value.

    beside: functions by verb; each runs the verb's tasks in place of the device.
    """
    return beside.get(task.verb, device.execute)(task)


def _join(device: Device, plan: Plan, transport: Transport) -> None:
    if not isinstance(device, JoinsRanks):
        raise BadInput(
            f"device {type(device).__name__} cannot be one of {plan.nodes.count} nodes: choose another one"
        )
    device.join(plan.nodes.index, transport, device)


def _serves(device: Device) -> Serves:
    if not isinstance(device, Serves):
        raise BadInput(
            f"device {type(device).__name__} runs batches only: serve with --device torch, cuda or mlx, or use "
            "`moesched simulate`"
        )
    return device

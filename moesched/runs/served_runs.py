"""Serving under the two drivers: on the virtual clock, and on a device."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from moesched.drivers.realtime import RealtimeDriver
from moesched.drivers.validation import new_engine, new_shared_engine, watching
from moesched.drivers.virtual import VirtualDriver
from moesched.engine import Engine
from moesched.errors import BadInput
from moesched.inputs.defaults import PREVIEW_ACCURACY
from moesched.machines.cost import cost_model
from moesched.machines.demand import CostModel
from moesched.routing import SeededRouting
from moesched.routing.router_forecast import RouterForecast
from moesched.runs.decisions import simulated_decisions
from moesched.runs.planning import make_lanes
from moesched.runs.serving import ARRIVALS, Serving, ServingListener
from moesched.runs.virtual_run import Perform
from moesched.seams import Device, KeepsTime, LaneKind, Observer, Policy, Routing, Serves
from moesched.serving.admission import Admission, FirstCome
from moesched.serving.arrivals import Arrivals
from moesched.serving.capacity import Capacity
from moesched.serving.places import Places
from moesched.steps.contention import lanes_contend
from moesched.steps.plan import Plan
from moesched.steps.run_state import RunState
from moesched.system.own_loop import run_on_own_loop
from moesched.tasks import Decision, HostKernel, Kernel, Lane, PageTransfer, Preview, Task
from moesched.trace import Recorder

EngineType = TypeVar("EngineType", bound=Engine)


class ServingSetup(NamedTuple):
    """A plan with its policy, and the requests that it serves.

    Attributes:
        plan: a policy's plan of the capacity's fullest batch.
        admission: chooses who runs next; by default those who came first.
        stop_tokens: each of them ends its request.
        listener: told of each token and each step.
        keeps_history: see `Serving`.
    """

    plan: Plan
    policy: Policy
    capacity: Capacity
    arrivals: Arrivals
    admission: Admission | None = None
    stop_tokens: Collection[int] = ()
    listener: ServingListener | None = None
    keeps_history: bool = True


def simulate_serving(
    setup: ServingSetup,
    *,
    cost: CostModel | None = None,
    routing: Routing | None = None,
    preview_accuracy: float = PREVIEW_ACCURACY,
    sharing: bool | None = None,
    observers: Sequence[Observer] = (),
    recorder: Recorder | None = None,
    device: Device | None = None,
    make_engine: Callable[[Iterable[Lane]], Engine] = new_engine,
) -> Serving:
    """Serve on the virtual clock.

    Args:
        device: computes every task as it ends; by default nothing is computed.
        make_engine: makes the engine of some lanes; by default a checked one if the environment asks for validation.
        cost, routing, preview_accuracy, sharing, recorder: as `moesched.runs.simulation.simulate` takes them.

    Raises:
        BadInput: the policy is for several accelerators or machines, or a request does not fit the capacity.
    """
    plan = setup.plan
    config = plan.layout.config
    routing = routing or SeededRouting(config.routed.experts, config.routed.top_k)
    previews = RouterForecast(routing, config.routed.experts, preview_accuracy)
    run = _assembled(setup, make_engine)
    if device is None:
        decide = simulated_decisions(plan, routing, previews, by_step=True)
        perform: dict[type[Task], Perform] = dict.fromkeys((Decision, Preview), decide)
    else:
        _serves(device).serve(plan)
        perform = dict.fromkeys((Kernel, HostKernel, PageTransfer, Decision, Preview), device.execute)
    driver = VirtualDriver(
        [run.engine],
        cost or cost_model(plan.machine, plan.layout.dtype),
        sharing=lanes_contend(plan) if sharing is None else sharing,
        perform=perform,
        observers=_observers(run, observers, recorder),
    )
    with _closed(run):
        driver.run(run.serving.run())
    return run.serving


def serve_on(
    device: Device,
    setup: ServingSetup,
    *,
    observers: Sequence[Observer] = (),
    recorder: Recorder | None = None,
) -> Serving:
    """Serve on a device, until no more requests arrive; the caller closes the device.

    Raises:
        BadInput: the device serves no requests that join and leave, or as `simulate_serving`.
    """
    serves = _serves(device)
    kinds: dict[str, LaneKind] = {**device.kinds, ARRIVALS: "awaitable"}
    run = _assembled(setup, new_shared_engine, kinds)
    driver = RealtimeDriver(
        [run.engine],
        partial(_execute, device, run.serving),
        kinds=kinds,
        streams=device.streams,
        observers=_observers(run, observers, recorder),
        clock=device.clock if isinstance(device, KeepsTime) else time.perf_counter_ns,
    )
    with _closed(run):
        serves.serve(setup.plan)
        run_on_own_loop(partial(driver.run, run.serving.run()))
    if recorder is not None:
        recorder.origin = driver.origin
    return run.serving


def _serves(device: Device) -> Serves:
    if not isinstance(device, Serves):
        raise BadInput(
            f"device {type(device).__name__} runs batches only: serve with --device torch, or use `moesched simulate`"
        )
    return device


def require_one_accelerator(plan: Plan, policy: Policy) -> None:
    """Raise BadInput if a plan is for several accelerators or machines."""
    if len(plan.stages) > 1 or plan.nodes.count > 1 or plan.layout.config.ranks > 1:
        raise BadInput(
            f"policy {type(policy).__name__} is for several accelerators or machines, and requests are served by one: "
            "choose another policy, or a machine with one accelerator"
        )


class _Run(NamedTuple, Generic[EngineType]):
    plan: Plan
    engine: EngineType
    run_state: RunState
    serving: Serving


def _assembled(
    setup: ServingSetup,
    make_engine: Callable[[Iterable[Lane]], EngineType],
    kinds: Mapping[str, LaneKind] | None = None,
) -> _Run[EngineType]:
    plan, policy = setup.plan, setup.policy
    require_one_accelerator(plan, policy)
    lanes = {**make_lanes(plan, kinds), ARRIVALS: Lane(ARRIVALS)}
    engine = make_engine(lanes.values())
    run_state = RunState(plan, engine, lanes)
    serving = Serving(
        run_state,
        policy,
        Places(setup.capacity),
        setup.arrivals,
        setup.admission or FirstCome(),
        stop_tokens=setup.stop_tokens,
        listener=setup.listener,
        keeps_history=setup.keeps_history,
    )
    return _Run(plan, engine, run_state, serving)


def _observers(
    run: _Run[EngineType], observers: Sequence[Observer], recorder: Recorder | None
) -> Sequence[Observer]:
    if recorder is None:
        return observers
    recorder.watch(run.engine, run.plan.memories, run.plan.weights.pools)
    return [*observers, recorder]


@contextmanager
def _closed(run: _Run[EngineType]) -> Iterator[None]:
    with ExitStack() as opened:
        opened.enter_context(closing(run.run_state))
        opened.enter_context(watching(run.run_state))
        yield


def _execute(device: Device, serving: Serving, task: Task) -> Any:
    """Run a task on the device; a task that waits for arrivals gives what is to be awaited."""
    return serving.wait_for_news() if task.verb == "wait" else device.execute(task)

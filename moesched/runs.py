"""Runs: one batch through one policy, on hardware or on the virtual clock, from names to a report.

Everything the command line does is a few calls of this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from moesched.cost import Roofline
from moesched.drivers.realtime import RealtimeDriver, SharedEngine
from moesched.drivers.virtual import VirtualDriver
from moesched.engine import Engine
from moesched.errors import BadInput, OverBudget
from moesched.generation import Generation, OnTokens
from moesched.machines import Machine
from moesched.models.layout import Page, WeightLayout
from moesched.plan import Batch, Plan
from moesched.routing import SeededRouting
from moesched.sampling import Sampling
from moesched.seams import CostModel, Observer, Policy, Routing
from moesched.step import Schedule
from moesched.tasks import Decision, Lane, Task

if TYPE_CHECKING:
    from moesched.trace.recorder import LastSteps, Recorder


class LaneUse(msgspec.Struct, frozen=True):
    """How long a lane was busy between the end of loading and the end of the run."""

    busy_seconds: float
    utilization: float


class PlanReport(msgspec.Struct, frozen=True):
    """The sizes that a run was planned with."""

    batch_size: int
    micro_batch_size: int
    new_tokens: int
    kept_pages: int
    streamed_pages: int
    kv_on: str
    discipline: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did, measured or predicted as `measured` says."""

    measured: bool
    policy: str
    machine: str
    model: str
    plan: PlanReport
    load_seconds: float
    prefill_seconds: float
    decode_tokens_per_second: float
    throughput_tokens_per_second: float
    step_seconds: list[float]
    peak_bytes: dict[str, int]
    lanes: dict[str, LaneUse]
    tasks: int
    wall_seconds: float
    simulated_seconds: float | None = None
    tokens: list[list[int]] | None = None
    text: list[str] | None = None
    interrupted: bool = False


def plan_run(
    machine: Machine,
    layout: WeightLayout,
    batch: Batch,
    policy: Policy,
    budgets: Mapping[str, int] | None = None,
    slot_bytes: Callable[[Page], int] | None = None,
) -> Plan:
    """Have a policy plan a batch.

    Raises:
        BadInput: the plan does not fit a budget; the message says by how many bytes, of what.
    """
    name = type(policy).__name__
    try:
        plan = Plan(machine, layout, batch, budgets, slot_bytes)
        policy.plan(plan)
    except OverBudget as error:
        remedy = "raise --budget, or lower --batch-size or --max-new-tokens"
        raise BadInput(f"policy {name} does not fit: {error}: {remedy}") from error
    plan.check()
    return plan


def make_lanes(plan: Plan) -> dict[str, Lane]:
    """The lanes of the plan's machine, by name: one for each processor's role, one for each path between memories."""
    names = ["accelerator", "host", *dict.fromkeys(link.lane for link in plan.machine.links)]
    return {name: Lane(name, plan.discipline) for name in names}


def simulate(
    plan: Plan,
    policy: Policy,
    *,
    cost: CostModel | None = None,
    routing: Routing | None = None,
    sharing: bool | None = None,
    observers: Sequence[Observer] = (),
    recorder: Recorder | LastSteps | None = None,
) -> Report:
    """Run a plan on the virtual clock.

    Args:
        cost: by default the roofline of the plan's machine.
        routing: by default uniform, with seed 0.
        sharing: whether tasks that run at once slow each other down; by default where lanes share a memory.
        recorder: keeps the tasks, for a trace.
    """
    started = time.perf_counter()
    lanes = make_lanes(plan)
    engine = Engine(lanes.values())
    observers = _with_recorder(observers, recorder, engine, plan)
    schedule = Schedule(plan, engine, lanes)
    driver = VirtualDriver(
        [engine],
        cost or Roofline(plan.machine, plan.layout.dtype),
        sharing=plan.machine.unified if sharing is None else sharing,
        perform={
            Decision: _decide(
                plan, routing or SeededRouting(plan.layout.config.experts, plan.layout.config.top_k)
            )
        },
        observers=observers,
    )
    generation = Generation(schedule, policy)
    driver.run(generation.run())
    return _report(plan, policy, generation, engine, lanes, started, measured=False)


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
) -> Report:
    """Run a plan on real hardware. Ctrl-C ends it cleanly; the report then holds the tokens so far."""
    started = time.perf_counter()
    device.begin(plan, prompts, sampling or Sampling())
    lanes = make_lanes(plan)
    engine = SharedEngine(lanes.values())
    observers = _with_recorder(observers, recorder, engine, plan)
    schedule = Schedule(plan, engine, lanes)
    generation = Generation(schedule, policy, stop_tokens=stop_tokens, on_tokens=on_tokens)
    driver = RealtimeDriver([engine], device.execute, kinds=device.kinds, observers=observers)

    async def main() -> None:
        try:
            await driver.run(generation.run())
        finally:
            await device.aclose()

    interrupted = False
    try:
        anyio.run(main, backend_options={"use_uvloop": _has_uvloop()})
    except KeyboardInterrupt:
        interrupted = True
    return _report(plan, policy, generation, engine, lanes, started, measured=True, interrupted=interrupted)


def _with_recorder(
    observers: Sequence[Observer], recorder: Recorder | LastSteps | None, engine: Engine, plan: Plan
) -> Sequence[Observer]:
    if recorder is None:
        return observers
    recorder.watch(engine, plan.memories)
    return [*observers, recorder]


def _decide(plan: Plan, routing: Routing) -> Callable[[Task], Any]:
    """What decisions come to where nothing is computed: routed experts, and tokens that nobody will read."""
    batches = plan.batch.micro_batches

    def decide(task: Task) -> Any:
        if task.verb == "route":
            return routing.choose(task.step, task.layer, task.micro_batch, task.work.tokens)
        return [0] * len(batches[task.micro_batch])

    return decide


def _report(
    plan: Plan,
    policy: Policy,
    generation: Generation,
    engine: Engine,
    lanes: Mapping[str, Lane],
    started: float,
    *,
    measured: bool,
    interrupted: bool = False,
) -> Report:
    ends = [end / 1e9 for end in generation.step_ends]
    loaded = generation.loaded / 1e9
    total = ends[-1] - loaded if ends else 0.0
    counts = [len(tokens) for tokens in generation.tokens]
    decoded = sum(max(0, count - 1) for count in counts)
    decoding = ends[-1] - ends[0] if len(ends) > 1 else 0.0
    batch = plan.batch
    return Report(
        measured=measured,
        policy=type(policy).__name__,
        machine=plan.machine.name,
        model=plan.layout.config.name,
        plan=PlanReport(
            batch_size=len(batch.prompts),
            micro_batch_size=max(len(requests) for requests in batch.micro_batches),
            new_tokens=batch.new_tokens,
            kept_pages=sum(len(kept.slots) for kept in plan.kept),
            streamed_pages=len(plan.layout.pages) - sum(len(kept.slots) for kept in plan.kept),
            kv_on=plan.kv_role or "",
            discipline=plan.discipline,
        ),
        load_seconds=loaded,
        prefill_seconds=ends[0] - loaded if ends else 0.0,
        decode_tokens_per_second=decoded / decoding if decoding else 0.0,
        throughput_tokens_per_second=sum(counts) / total if total else 0.0,
        step_seconds=[after - before for before, after in zip([loaded, *ends], ends, strict=False)],
        peak_bytes={memory.name: memory.peak for memory in plan.memories.values()},
        lanes={name: _lane_use(lane, generation, total) for name, lane in lanes.items()},
        tasks=engine.submitted,
        wall_seconds=time.perf_counter() - started,
        simulated_seconds=None if measured else (ends[-1] if ends else 0.0),
        tokens=generation.tokens if measured else None,
        interrupted=interrupted,
    )


def _lane_use(lane: Lane, generation: Generation, total: float) -> LaneUse:
    busy = (lane.busy - generation.busy_loading.get(lane.name, 0)) / 1e9
    return LaneUse(busy, busy / total if total else 0.0)


def _has_uvloop() -> bool:
    try:
        import uvloop  # noqa: F401  # only whether it is there: Windows has none
    except ImportError:
        return False
    return True

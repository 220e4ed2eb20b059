"""Measure the engine: tasks per second on the virtual clock, microseconds per task in real time.

The virtual part is CGOPipe on Mixtral-8x7B's shape on a T4: the policy, the dependencies, the run and its recording,
beside SimPy with one process for each task of the same graph. The real-time part is chains and fork-joins of tasks
that do nothing. All are run in turns; medians count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import anyio
import simpy

from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result
from moesched.drivers.capture import CapturingEngine, StepGraph, capture
from moesched.drivers.pricing import nanoseconds, no_garbage_collection
from moesched.drivers.realtime import RealtimeDriver, SharedEngine
from moesched.machines import load_machine
from moesched.machines.roofline import Roofline
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import make_lanes, plan_run
from moesched.runs.simulation import simulate
from moesched.seams import LaneKind, Policy
from moesched.steps.plan import Plan
from moesched.steps.run_state import RunState
from moesched.tasks import Block, Kernel, Lane, Task
from moesched.trace import Recorder
from moesched.work import Work

MICRO_BATCHES, MICRO_BATCH_SIZE, PROMPT_TOKENS = 15, 36, 77
PAGE_BYTES = 112 << 20
MACHINE = str(Path(__file__).parent / "_engine_machine.toml")
STEPS, REPLAYED_STEPS, SHARED_STEPS, SIMPY_STEPS = 9, 129, 5, 3
NOTHINGS, FAN = 10_000, 98
NO_WORK = Work("nothing", "none")


def summary(values: list[float], best: Callable[[list[float]], float]) -> dict[str, float]:
    """The median, and the best of all rounds."""
    return {"median": round(median(values), 2), "best": round(best(values), 2)}


# -- the virtual clock -----------------------------------------------------------------------------


class InOrder:
    """Has lanes issue a policy's tasks in order; for `plan` only."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.prefill, self.decode = policy.prefill, policy.decode

    def plan(self, plan: Plan) -> None:
        """Plan as the policy does."""
        plan.discipline = "in_order"
        self.policy.plan(plan)


def planned(steps: int) -> tuple[Plan, Policy]:
    """CGOPipe on Mixtral-8x7B's shape, about as many pages a layer as micro-batches.

    Lanes issue in order: which of two tasks that become ready at once goes first is then no matter of the simulator.
    """
    policy = InOrder(make_policy("cgopipe"))
    layout = weight_layout(SHAPES["mixtral-8x7b"], page_bytes=PAGE_BYTES)
    batch = split_batch([PROMPT_TOKENS] * (MICRO_BATCHES * MICRO_BATCH_SIZE), steps, MICRO_BATCH_SIZE)
    plan = plan_run(load_machine(MACHINE), layout, batch, policy)
    return plan, policy.policy


def tasks_per_second(steps: int, *, replay: bool = False, sharing: bool = False) -> float:
    """Policy, dependencies, run and recording."""
    plan, policy = planned(steps)
    report = simulate(plan, policy, replay=replay, sharing=sharing, recorder=Recorder())
    return report.tasks / report.wall_seconds


def simpy_tasks_per_second() -> float:
    """The same graph in SimPy, without the time that building the graph took."""
    steps, cost = captured()
    started = perf_counter()
    with no_garbage_collection():
        run_in_simpy(steps, cost)
    seconds = perf_counter() - started
    return sum(sum(lane >= 0 for lane in step.lanes) for step in steps) / seconds


def same_makespan() -> bool:
    """Test whether SimPy ends the graph at the same nanosecond."""
    steps, cost = captured()
    plan, policy = planned(SIMPY_STEPS)
    report = simulate(plan, policy, sharing=False)
    assert report.simulated_seconds is not None
    return run_in_simpy(steps, cost) == round(report.simulated_seconds * 1e9)


def captured() -> tuple[list[StepGraph], Roofline]:
    """The graph of a few steps, and what prices it."""
    plan, policy = planned(SIMPY_STEPS)
    lanes = make_lanes(plan)
    run_state = RunState(plan, CapturingEngine(lanes.values()), lanes)
    with closing(run_state):
        return capture(run_state, policy), Roofline(plan.machine, plan.layout.dtype)


def run_in_simpy(steps: list[StepGraph], cost: Roofline) -> int:
    """One process for each task: wait for those before it, take the lane, spend the time; returns the end."""
    world = simpy.Environment()
    lanes: dict[Lane, simpy.PriorityResource] = {}
    ends: list[simpy.Event] = []
    submitted = [world.event() for _ in steps]

    def process(task: Task, edges: tuple[int, ...], number: int, step: int) -> Any:
        yield submitted[step]
        waiting = [ends[number - back] for back in edges if not ends[number - back].processed]
        if waiting:
            yield simpy.AllOf(world, waiting)
        if task.work.resource:
            lane = lanes.setdefault(task.lane, simpy.PriorityResource(world))
            with lane.request(priority=task.key) as turn:
                yield turn
                yield world.timeout(nanoseconds(task.work, cost))
        ends[number].succeed()

    def submit() -> Any:
        base = 0
        gates = []
        for graph in steps:
            gates.append([base + position for position in graph.final])
            base += len(graph.tasks)
        for index, gate in enumerate(submitted):
            if index:
                yield simpy.AllOf(world, [ends[number] for number in gates[max(0, index - 2)]])
            gate.succeed()
        yield simpy.AllOf(world, [ends[number] for number in gates[-1]])
        return world.now

    for step, graph in enumerate(steps):
        for task, edges in zip(graph.tasks, graph.edges, strict=True):
            ends.append(world.event())
            world.process(process(task, edges, len(ends) - 1, step))
    last = world.process(submit())
    world.run()
    return int(last.value)


# -- real time -------------------------------------------------------------------------------------


def on_lanes(shape: Callable[[SharedEngine, tuple[Lane, ...]], Any], kind: LaneKind, lanes: int = 1) -> float:
    """Microseconds per task of a graph of tasks that do nothing."""
    ours = tuple(Lane(f"lane {number}") for number in range(lanes))
    engine = SharedEngine(ours)
    driver = RealtimeDriver([engine], lambda task: None, kinds={lane.name: kind for lane in ours})
    started = perf_counter()
    anyio.run(driver.run, shape(engine, ours), backend_options={"use_uvloop": True})
    return (perf_counter() - started) / NOTHINGS * 1e6


async def chain(engine: SharedEngine, lanes: tuple[Lane, ...]) -> None:
    """Each task after the one before, lane by lane."""
    block = [Block("data")]
    for number in range(NOTHINGS):
        last = engine.submit(Kernel(lanes[number % len(lanes)], NO_WORK, "nothing"), block, block)
    await last


async def awaited_chain(engine: SharedEngine, lanes: tuple[Lane, ...]) -> None:
    """The same, with a policy that awaits each one."""
    block = [Block("data")]
    for _ in range(NOTHINGS):
        await engine.submit(Kernel(lanes[0], NO_WORK, "nothing"), block, block)


async def fork_join(engine: SharedEngine, lanes: tuple[Lane, ...]) -> None:
    """One task, many after it, one after those."""
    start = [Block("start")]
    for _ in range(NOTHINGS // (FAN + 2)):
        engine.submit(Kernel(lanes[0], NO_WORK, "fork"), (), start)
        parts = [Block("part") for _ in range(FAN)]
        for number, part in enumerate(parts):
            engine.submit(Kernel(lanes[number % len(lanes)], NO_WORK, "part"), start, (part,))
        last = engine.submit(Kernel(lanes[0], NO_WORK, "join"), parts, start)
    await last


VIRTUAL: dict[str, Callable[[], float]] = {
    "built": lambda: tasks_per_second(STEPS),
    "replayed": lambda: tasks_per_second(REPLAYED_STEPS, replay=True),
    "sharing": lambda: tasks_per_second(SHARED_STEPS, sharing=True),
    "simpy": simpy_tasks_per_second,
}
REAL: dict[str, Callable[[], float]] = {
    "chain in the loop": lambda: on_lanes(chain, "loop"),
    "fork-join in the loop": lambda: on_lanes(fork_join, "loop", lanes=4),
    "chain on a worker thread": lambda: on_lanes(chain, "thread"),
    "fork-join on worker threads": lambda: on_lanes(fork_join, "thread", lanes=4),
    "chain across two worker threads": lambda: on_lanes(chain, "thread", lanes=2),
    "chain on a worker thread, each awaited": lambda: on_lanes(awaited_chain, "thread"),
}


def claims(result: Result) -> Iterator[Claim]:
    """The engine's speed."""
    bars = {
        "building the graph": ("built", 5),
        "replaying it": ("replayed", 22),
        "with sharing": ("sharing", 4),
    }
    for words, (name, bar) in bars.items():
        rate, ratio = result["tasks_per_second"][name]["median"], result["times_simpy"][name]
        figure = f"{rate:,.0f} tasks/s, {ratio}x SimPy"
        yield Claim(f"simulation of CGOPipe, {words}", figure, f"≥ {bar}x SimPy", ratio >= bar)
    for name in ("chain on a worker thread", "chain across two worker threads"):
        yield Claim(
            f"empty tasks, {name}", f"{result['microseconds_per_task'][name]['median']:.1f} µs a task"
        )


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=(*VIRTUAL, *REAL),
    rounds=15,
    rounds_help="turns of each measurement; medians count",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything in turns and write the figures."""
    options = BENCHMARK.parse(arguments)
    measured: dict[str, list[float]] = {name: [] for name in options.only}
    for _ in track(range(options.rounds), "measuring", still=True):
        for name, values in measured.items():
            values.append((VIRTUAL | REAL)[name]())
    figures = {
        "same_makespan_as_simpy": same_makespan(),
        "tasks_per_second": {name: summary(measured[name], max) for name in VIRTUAL if name in measured},
        "times_simpy": times_simpy(measured),
        "microseconds_per_task": {name: summary(measured[name], min) for name in REAL if name in measured},
    }
    return BENCHMARK.write(figures)


def times_simpy(measured: dict[str, list[float]]) -> dict[str, float]:
    """Median ratios of the rounds in which both were measured."""
    return {
        name: round(median(a / b for a, b in zip(measured[name], measured["simpy"], strict=True)), 1)
        for name in ("built", "replayed", "sharing")
        if name in measured and "simpy" in measured
    }


if __name__ == "__main__":
    sys.exit(main())

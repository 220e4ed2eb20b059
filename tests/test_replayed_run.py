"""A recorded run once more: the virtual clock finds its times again from graph and durations alone."""

from __future__ import annotations

import asyncio
import random
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moesched.analysis.handovers import Handover, mean_handovers
from moesched.analysis.replayed_run import replay_recording, without_loading
from moesched.drivers.capture import WORD, Edges
from moesched.drivers.realtime import RealtimeDriver, SharedEngine
from moesched.engine import Engine
from moesched.errors import BadInput
from moesched.machines import load_machine
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.models.tensor_parallel import cut_config
from moesched.plugins import make_policy, shipped_policies
from moesched.policies.resident import Resident
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.seams import Policy
from moesched.steps.plan import Plan
from moesched.steps.verbs.base import CLASSES
from moesched.tasks import IDLE, PREFETCH, Block, Collective, Discipline, Kernel, Lane, PageTransfer, Task
from moesched.trace import Recorder, Recording
from moesched.work import Work
from runs import FORTY_PERCENT, make_plan, realtime_run, virtual_run
from test_pipeline import TWO
from test_priorities import Urged
from traces import by_hand, edges_by_id, kept, run_graph, run_ranks

POLICIES = [name for name in shipped_policies() if not name.startswith("ep_")]
"""All but those of several nodes, whose runs are not replayed."""


@pytest.mark.parametrize("policy", POLICIES)
def test_a_predicted_run_takes_the_same_time_to_the_nanosecond(policy: str, tmp_path: Path) -> None:
    budgets = None if policy == "resident" else FORTY_PERCENT
    run = virtual_run(policy, budgets=budgets, new_tokens=5)
    kept(run.recording, run.about, tmp_path)
    assert replay_recording(run.recording).slices == run.recording.slices


@pytest.mark.parametrize("policy", ["resident", "layer_streaming", "cgopipe"])
def test_so_does_a_prediction_whose_steps_were_captured_and_played(policy: str) -> None:
    chosen, recorder = make_policy(policy), Recorder()
    simulate(make_plan(chosen, new_tokens=7), chosen, sharing=False, replay=True, recorder=recorder)
    played = recorder.recording()
    assert by_number(replay_recording(played)) == by_number(played)


def numbered(first: int, waits: list[list[int]]) -> list[Task]:
    """Make tasks with ids from `first` on, which wait for the tasks with these ids."""
    lane, work = Lane("gpu"), Work("w", "gpu")
    return [
        Kernel(lane, work, "run", id=first + position, deps=numbers) for position, numbers in enumerate(waits)
    ]


def test_edges_that_others_imply_are_left_out_however_far_back_they_go() -> None:
    chosen = random.Random(1)
    edges, found, expected = Edges(), list[tuple[int, ...]](), list[tuple[int, ...]]()
    implied: list[int] = []  # for each task, the bits of those that it waits for, whether directly or not
    loads, size = range(40), WORD + 500
    for step in range(4):
        first, waits = len(implied), list[list[int]]()
        for number in range(first, first + size):
            near = range(max(first - size, 0), number)
            waits.append(chosen.sample(near, min(len(near), 3)) + chosen.choices(loads, k=bool(step)))
            before = 0
            needed = []
            for other in sorted({*waits[-1]}, reverse=True):
                if not before >> other & 1:
                    needed.append(number - other)
                    before |= implied[other] | 1 << other
            implied.append(before)
            expected.append(tuple(needed))
        found += edges.needed(numbered(first, waits))
    assert found == expected


def test_the_edges_of_a_large_step_need_little_memory() -> None:
    size = 12_000
    steps = [
        numbered(
            first,
            [[number - 1, number - 40] if number >= 40 else [] for number in range(first, first + size)],
        )
        for first in (0, size, 2 * size)
    ]
    edges = Edges()
    tracemalloc.start()
    try:
        for tasks in steps:
            edges.needed(tasks)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (
        peak < 1000 * 2 * size
    )  # a bit for each task of two steps, in each task, would be three times as much


def test_a_measured_run_loses_what_passed_between_its_tasks() -> None:
    measured = realtime_run("cgopipe", budgets=FORTY_PERCENT).recording
    replayed = replay_recording(measured)
    assert 0 < replayed.end < measured.end
    assert [lengths(replayed), edges_by_id(replayed)] == [lengths(measured), edges_by_id(measured)]


def test_start_times_are_not_reused() -> None:
    recording = recorded(by_hand("gpu: first 10 writes h; gpu: second 20 reads h"))
    for each in recording.slices:
        each.start += 1000 * each.id
        each.end += 1000 * each.id
    assert timetable(replay_recording(recording)) == {"first": (0, 10), "second": (10, 30)}


def test_the_policy_waits_where_it_had_to() -> None:
    """Nothing but the policy's patience keeps the second lane's task from starting at once."""

    async def policy(engine: Engine) -> None:
        await submit(engine, "gpu", "route", 10)
        submit(engine, "copies", "fetch", 5)

    recording = recorded(policy)
    assert recording.slices[0].awaited_at == 1
    assert timetable(replay_recording(recording)) == {"route": (0, 10), "fetch": (10, 15)}


def test_a_policy_that_awaits_several_tasks_at_once_waits_for_all_of_them() -> None:
    async def policy(engine: Engine) -> None:
        views = [Block("slot 0"), Block("slot 1")]
        for number, slot in enumerate(views):
            submit(engine, "copies", f"fetch {number}", 7, writes=[slot])
        await engine.join(views, [Block("view")])
        submit(engine, "gpu", "kernel", 1)

    assert timetable(replay_recording(recorded(policy)))["kernel"] == (14, 15)


def test_lanes_in_order_wait_for_what_was_submitted_first() -> None:
    graph = by_hand("copies: fetch 50 writes p; gpu: needs_page 5 reads p; gpu: needs_nothing 5")
    in_order, ready_first = (replay_recording(recorded(graph, each)) for each in ("in_order", "ready_first"))
    assert timetable(in_order)["needs_nothing"] == (55, 60)
    assert timetable(ready_first)["needs_nothing"] == (0, 5)


def test_a_demand_still_overtakes_a_prefetch() -> None:
    def graph(engine: Engine) -> None:
        submit(engine, "copies", "running", 5)
        submit(engine, "copies", "prefetch", 5, priority_class=PREFETCH)
        submit(engine, "copies", "demand", 5)

    assert timetable(replay_recording(recorded(graph)))["demand"] == (5, 10)


def test_what_nobody_needed_yet_keeps_its_place_on_its_lane() -> None:
    """It ran in a gap that a slower task before it closes; had it not, it would have been given up."""

    async def policy(engine: Engine) -> None:
        submit(engine, "copies", "fetch", 10)
        submit(engine, "copies", "foretold", 5, priority_class=IDLE)
        await submit(engine, "gpu", "route", 12)
        submit(engine, "copies", "needed", 5)

    recording = recorded(policy)
    longer = [
        3 + each.end - each.start if each.task.verb == "fetch" else each.end - each.start
        for each in recording.slices
    ]
    assert timetable(recording)["needed"] == (15, 20)
    assert timetable(replay_recording(recording, longer)) == {
        "fetch": (0, 13), "route": (0, 12), "foretold": (13, 18), "needed": (18, 23),
    }  # fmt: skip


def test_a_collective_still_waits_for_the_last_rank() -> None:
    async def rank(engine: Engine, nanoseconds: int) -> None:
        hidden = Block("hidden")
        submit(engine, "gpu", "compute", nanoseconds, writes=[hidden])
        reduce = Collective(lane(engine, "copies"), Work("sum", "", nanoseconds=7), "sum", signature="sum")
        engine.collective(reduce, (hidden,), (hidden,))

    recorder = Recorder()
    engines = [Engine([Lane("gpu"), Lane("copies")]) for _ in range(2)]
    for engine in engines:
        recorder.watch(engine)
    run_ranks(engines, recorder, rank(engines[0], 10), rank(engines[1], 90))
    replayed = replay_recording(recorder.recording())
    spans = {(each.lane.rank, each.task.verb): (each.start, each.end) for each in replayed.slices}
    assert spans[0, "sum"] == spans[1, "sum"] == (90, 97)


def test_other_durations_may_be_tried() -> None:
    recording = recorded(by_hand("copies: fetch 50 writes p; gpu: kernel 10 reads p"))
    assert timetable(replay_recording(recording, [20, 10])) == {"fetch": (0, 20), "kernel": (20, 30)}


def test_without_loading_what_was_loaded_is_there_at_once() -> None:
    run = virtual_run("cgopipe", budgets=FORTY_PERCENT)
    steps = without_loading(run.recording)
    assert {each.step for each in steps.slices} == {0, 1, 2}
    assert replay_recording(steps).end == run.recording.end - run.generation.loaded


def test_a_recording_of_nothing_but_loading_stays() -> None:
    recording = recorded(lambda engine: submit(engine, "gpu", "load", 3, step=-1))
    assert without_loading(recording) is recording


def test_an_empty_recording_is_replayed_in_no_time() -> None:
    assert replay_recording(recorded(lambda engine: None)).end == 0


def test_an_edge_from_a_later_task_is_refused() -> None:
    recording = recorded(by_hand("gpu: first 1; gpu: second 1"))
    damaged = msgspec.structs.replace(recording, producers=[(1,), ()])
    with pytest.raises(
        BadInput, match="first, task 0, waits for a task that was submitted later: record the run again"
    ):
        replay_recording(damaged)


def recorded(graph: Callable[[Engine], object], discipline: Discipline = "ready_first") -> Recording:
    """Tasks of a hand-written policy on two lanes of the virtual clock."""
    return run_graph(graph, ["gpu", "copies"], discipline)


def submit(
    engine: Engine,
    where: str,
    verb: str,
    nanoseconds: int,
    *,
    reads: list[Block] | None = None,
    writes: list[Block] | None = None,
    step: int = 0,
    priority_class: int = 0,
) -> Task:
    """Submit a task of known length: a transfer on the lane of copies, a kernel elsewhere."""
    kind: Any = PageTransfer if where == "copies" else Kernel
    task: Task = kind(lane(engine, where), Work(verb, "", nanoseconds=nanoseconds), verb, step=step)
    return engine.submit(task, reads or (), writes or (), priority_class=priority_class)


def lane(engine: Engine, name: str) -> Lane:
    """A lane by its name."""
    [found] = [each for each in engine.lanes if each.name == name]
    return found


def timetable(recording: Recording) -> dict[str, tuple[int, int]]:
    """The times of each task, by its verb."""
    return {each.task.verb: (each.start, each.end) for each in recording.slices}


def by_number(recording: Recording) -> dict[int, tuple[int, int]]:
    """The times of each task, by its number."""
    return {each.id: (each.start, each.end) for each in recording.slices}


def lengths(recording: Recording) -> dict[int, int]:
    """Duration of each task, by its number."""
    return {each.id: each.end - each.start for each in recording.slices}


# -- time between tasks ------------------------------------------------------------------------------------------------


TICK = 10


def ticking_run() -> Recording:
    """Two tasks, the second submitted when the first is known to have ended; each look at the clock takes a tick."""
    ticks = iter(range(0, 1000, TICK))
    lane = Lane("gpu")
    engine, recorder = SharedEngine([lane]), Recorder()
    recorder.watch(engine)
    driver = RealtimeDriver([engine], lambda task: None, observers=[recorder], clock=lambda: next(ticks))

    async def policy() -> None:
        await engine.submit(Kernel(lane, Work("test", ""), "first"))
        await engine.submit(Kernel(lane, Work("test", ""), "second"))

    asyncio.run(driver.run(policy()))
    return recorder.recording()


def test_a_recording_knows_how_long_threads_took_to_wake_and_the_policy_to_submit() -> None:
    first, second = ticking_run().slices
    assert (second.start - first.end, second.submit_delay, second.dispatch) == (2 * TICK, TICK, TICK)


def test_a_replay_with_handovers_takes_as_long_as_the_run() -> None:
    measured = ticking_run()
    bare, whole = replay_recording(measured), replay_recording(measured, handovers=True)
    assert seconds(whole) == seconds(measured) == seconds(bare) + 2 * TICK


def test_each_handover_counts_with_the_mean_of_its_kind() -> None:
    recording = chain(["gpu"] * 4)
    dispatched(recording, [0, 2, 6, 1])
    replayed = replay_recording(recording, handovers=True)
    assert [(each.start, each.end) for each in replayed.slices] == [(0, 10), (13, 23), (26, 36), (39, 49)]


def test_going_on_with_the_next_task_is_another_kind_than_waking_another_lane() -> None:
    recording = chain(["gpu", "gpu", "host", "gpu"])
    dispatched(recording, [0, 2, 20, 30])
    assert [each.dispatch for each in mean_handovers(recording)] == [0, 2, 20, 30]


def test_the_handovers_of_a_long_run_are_averaged_in_a_moment() -> None:
    recording = chain(["gpu"] * 6000)
    dispatched(recording, [2] * 6000)
    began = time.process_time()
    assert {each.dispatch for each in mean_handovers(recording)} == {2}
    assert time.process_time() - began < 1


def test_what_the_policy_did_before_the_first_task_is_no_part_of_the_run() -> None:
    recording = chain(["gpu", "gpu"])
    for each in recording.slices:
        each.submit_delay = 1000
    assert [each.submit_delay for each in mean_handovers(recording)] == [0, 1000]


def test_a_prediction_has_no_handovers() -> None:
    predicted = virtual_run("cgopipe", budgets=FORTY_PERCENT).recording
    assert set(mean_handovers(predicted)) == {Handover()}


@pytest.mark.parametrize("policy", ["cgopipe", "expert_streaming"])
def test_a_trace_keeps_the_handovers(policy: str, tmp_path: Path) -> None:
    run = realtime_run(policy, budgets=FORTY_PERCENT)
    kept(run.recording, run.about, tmp_path)
    assert any(each.dispatch and each.submit_delay > 0 for each in run.recording.slices)


def chain(lanes: list[str]) -> Recording:
    """One task after the other on these lanes, 10 nanoseconds each."""

    def graph(engine: Engine) -> None:
        block = Block("hidden")
        there = {lane.name: lane for lane in engine.lanes}
        for number, name in enumerate(lanes):
            work = Work("test", "", nanoseconds=10)
            engine.submit(Kernel(there[name], work, f"task {number}"), (block,), (block,))

    return run_graph(graph, sorted(set(lanes)))


def dispatched(recording: Recording, nanoseconds: list[int]) -> None:
    """Have each task come so much later than the one before it let it start."""
    late = 0
    for each, lead in zip(recording.slices, nanoseconds, strict=True):
        late += lead
        each.start, each.end, each.dispatch = each.start + late, each.end + late, lead


def seconds(recording: Recording) -> int:
    return recording.end - min(each.start for each in recording.slices)


# -- simulations whose steps are captured and played -------------------------------------------------------------------


FIXED = ("resident", "layer_streaming", "cgopipe", "flexgen", "flexgen_cpu", "fastdecode")
Made = tuple[Plan, Policy]


class InOrder:
    """Has the lanes issue a policy's tasks in order."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.prefill, self.decode = policy.prefill, policy.decode

    def plan(self, plan: Plan) -> None:
        plan.discipline = "in_order"
        self._policy.plan(plan)


def planned(
    make: Callable[[], Policy],
    *,
    in_order: bool = False,
    ranks: int = 1,
    new_tokens: int = 9,
    chunk: int | None = None,
) -> Made:
    """A plan whose fast memory is too small for the weights that stream."""
    policy = make()
    budgets = None if isinstance(policy, Resident) else FORTY_PERCENT
    policy = InOrder(policy) if in_order else policy
    machine = load_machine("t4" if ranks == 1 else f"t4x{ranks}")
    layout = weight_layout(cut_config(SHAPES["mixtral-0.8b"], ranks))
    batch = msgspec.structs.replace(split_batch([8, 5, 9, 7], new_tokens, 2), prefill_chunk=chunk)
    return plan_run(machine, layout, batch, policy, budgets), policy


def pipeline() -> Made:
    policy = make_policy("flexgen_pipeline")
    layout = weight_layout(SHAPES["mixtral-0.8b"])
    return plan_run(TWO, layout, split_batch([32] * 8, 9, 2), policy, {"gpu": 500_000_000}), policy


CGOPIPE = partial(make_policy, "cgopipe")
REPLAYED: dict[str, Callable[[], Made]] = {
    **{f"{name}, in order": partial(planned, partial(make_policy, name), in_order=True) for name in FIXED},
    **{f"{name} on two ranks": partial(planned, partial(make_policy, name), ranks=2) for name in FIXED},
    **{f"{each} kernels": partial(planned, partial(Urged, each)) for each in CLASSES},
    **{f"{steps} steps": partial(planned, CGOPIPE, new_tokens=steps) for steps in (2, 3)},
    "chunks of prompts": partial(planned, CGOPIPE, chunk=4),
    "a pipeline": pipeline,
}


@pytest.mark.parametrize("case", REPLAYED)
def test_a_replay_has_the_report_the_tasks_the_edges_and_the_pools_of_the_run(case: str) -> None:
    seen = []
    for replay in (False, True):
        plan, policy = REPLAYED[case]()
        recorder = Recorder()
        report = simulate(plan, policy, sharing=False, replay=replay, recorder=recorder)
        assert report.simulated_steps is not None
        assert plan.batch.new_tokens < 9 or (report.simulated_steps < 9) is replay
        recording = recorder.recording()
        times = sorted(
            (each.id, each.task.label, each.lane.name, each.task.resource, each.start, each.end)
            for each in recording.slices
        )
        same = msgspec.structs.replace(report, wall_seconds=0.0, simulated_steps=None)
        seen.append((same, times, edges_by_id(recording), recording.pools))
    assert seen[0] == seen[1]

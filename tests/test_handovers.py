"""Time between the tasks of a measured run: recorded, kept in the trace, and counted by a replay as means."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moesched.analysis.handovers import Handover, mean_handovers
from moesched.analysis.replayed_run import replay_recording
from moesched.drivers.realtime import RealtimeDriver, SharedEngine
from moesched.engine import Engine
from moesched.tasks import Block, Kernel, Lane, Work
from moesched.trace import Recorder, Recording, read_trace, write_trace
from runs import FORTY_PERCENT, realtime_run, virtual_run
from traces import run_graph

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
    write_trace(tmp_path / "trace.json", run.recording, run.about)
    read = read_trace(tmp_path / "trace.json").recording
    assert any(each.dispatch and each.submit_delay > 0 for each in read.slices)
    assert mean_handovers(read) == mean_handovers(run.recording)


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

"""Bounded recorders keep the last steps of a run, as the whole recording shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesched.engine import Engine
from moesched.plugins import make_policy
from moesched.runs.simulation import simulate
from moesched.steps.pool_counts import Counted
from moesched.tasks import Block, Kernel, Lane, PageTransfer
from moesched.trace import About, LastSteps, Recorder, check_trace, summarize, write_trace
from moesched.trace.recorded_tasks import RankRecord
from moesched.work import Work
from runs import FORTY_PERCENT, make_plan, virtual_run
from traces import edges_by_id, kept, task, timetable


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_bounded_recorder_keeps_the_last_steps_as_the_whole_one_shows_them(
    steps: int, tmp_path: Path
) -> None:
    whole = virtual_run("cgopipe", budgets=FORTY_PERCENT, new_tokens=6).recording
    last = virtual_run("cgopipe", LastSteps(steps), budgets=FORTY_PERCENT, new_tokens=6)
    found = last.recording
    assert found.trimmed == (steps < 7)
    assert found.slices == [each for each in whole.slices if each.step >= 6 - steps]
    ids = {each.id for each in found.slices}
    assert edges_by_id(found) == {edge for edge in edges_by_id(whole) if set(edge) <= ids}
    filled = {each.memory: each.pages for each in whole.memory}
    assert {each.memory: each.pages for each in found.memory} == filled, "slots that were filled before count"
    assert found == whole if steps == 7 else found.joins < whole.joins
    kept(found, last.about, tmp_path)


def test_a_task_that_ends_after_its_step_was_dropped_does_not_come_back() -> None:
    recorder = LastSteps(1)
    engine = Engine([Lane("gpu"), Lane("copies")])
    recorder.watch(engine)
    gpu, copies = engine.lanes
    slot = Block("slot", 64, "fast")
    late = PageTransfer(copies, Work("copy", "link"), "late", step=0, start=0, end=9, slots=(slot,))
    for each in (task(gpu, "early", step=0), task(gpu, "next", step=1), late):
        recorder.ended(each)
    assert [each.task.verb for each in recorder.recording().slices] == ["next"]
    assert {sample.pages for sample in recorder.recording().memory} == {64}


def test_notes_of_dropped_steps_are_dropped_but_for_the_counts_at_the_first_kept_ones_start() -> None:
    notes = RankRecord(Engine([Lane("gpu")]), {}, [])
    counts = [Counted(number, 0, 0, 0, 0) for number in range(4)]
    notes.awaits += [(1, 2), (5, 6), (7, 8)]
    notes.submit_delays += [(2, 9), (6, 9)]
    notes.counts.append([(0, counts[0]), (4, counts[1]), (5, counts[2]), (8, counts[3])])
    notes.trim(5, step=1)
    assert (notes.awaits, notes.submit_delays) == ([(5, 6), (7, 8)], [(6, 9)])
    assert notes.counts == [[(5, counts[2]), (8, counts[3])]]
    notes.trim(7, step=2)
    assert notes.counts == [[(5, counts[2]), (8, counts[3])]]


def test_a_bounded_recorder_of_no_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="ask for 1 or more"):
        LastSteps(0)


def test_a_bounded_recorder_keeps_the_same_steps_of_a_replayed_run() -> None:
    recordings = []
    for replay in (False, True):
        chosen, recorder = make_policy("cgopipe"), LastSteps(2)
        simulate(make_plan(chosen, new_tokens=7), chosen, sharing=False, replay=replay, recorder=recorder)
        recordings.append(recorder.recording())
    built, replayed = recordings
    assert timetable(replayed) == timetable(built)
    assert edges_by_id(replayed) == edges_by_id(built)
    assert summarize(replayed).steps == summarize(built).steps


@given(st.data())
@settings(max_examples=50)
def test_tasks_that_took_no_time_have_slices_that_follow_each_other(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """As those of a GPU, whose clock ticks every half a microsecond."""
    engine = Engine([Lane("gpu"), Lane("copies"), Lane("host")])
    recorder = Recorder()
    recorder.watch(engine)
    ran: list[Kernel] = []
    for number in range(data.draw(st.integers(1, 12))):
        lane = data.draw(st.sampled_from(engine.lanes))
        needed = sorted(data.draw(st.sets(st.integers(0, number - 1), max_size=3))) if number else []
        before = [each.end for each in ran if each.lane is lane or each.id in needed]
        each = task(lane, "work")
        each.id, each.deps = number, needed
        each.start = max(before, default=0) + data.draw(st.integers(0, 1))
        each.end = each.start + data.draw(st.integers(0, 2))
        ran.append(each)
    for each in data.draw(st.permutations(ran)):
        recorder.ended(each)
    recording = recorder.recording()
    write_trace(file := tmp_path_factory.mktemp("traces") / "trace.json", recording, About(driver="realtime"))
    assert check_trace(file) == []
    added = [each.end - ran[each.id].end for each in recording.slices]
    assert max(added) <= sum(each.start == each.end for each in ran)

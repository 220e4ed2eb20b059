"""Reasons that two runs took different times: the gap in parts that add up to it, and both runs in one trace."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesched.analysis.compare import compare_runs
from moesched.analysis.compared_runs import run_of_recording
from moesched.analysis.difference import Cause, Difference, explain_difference
from moesched.errors import BadInput
from moesched.trace import LaneName, Recording, Slice, check_trace, read_trace, summarize, write_trace
from runs import FORTY_PERCENT, realtime_run, virtual_run
from traces import MEASURED, PREDICTED, events_of, slice_of, slices_of


def test_a_slower_kind_of_task_on_the_critical_path_is_the_whole_gap() -> None:
    reports: list[tuple[int, int]] = []
    told = explain_difference(
        pipeline(fetch=10, kernel=2),
        pipeline(fetch=15, kernel=2),
        progress=lambda done, total: reports.append((done, total)),
    )
    assert told.seconds == pytest.approx(20e-9)
    assert (told.causes[0].kind, told.causes[0].lane, told.causes[0].phase) == ("fetch", "link", "decode")
    assert told.causes[0].means == pytest.approx((10e-9, 15e-9))
    assert told.causes[0].share == pytest.approx(1)
    assert told.lanes[0].lane == "link"
    assert told.lanes[0].busy_seconds == pytest.approx((40e-9, 60e-9))
    assert reports == [(number, len(reports)) for number in range(1, len(reports) + 1)], (
        "a report for each replay"
    )


def test_a_slower_kind_that_hides_behind_another_lane_makes_no_difference() -> None:
    told = explain_difference(pipeline(fetch=10, kernel=2), pipeline(fetch=10, kernel=8))
    # Only the last kernel has no fetch to hide behind.
    assert told.seconds == pytest.approx(6e-9)
    told = explain_difference(pipeline(fetch=10, kernel=2), pipeline(fetch=12, kernel=8))
    assert cause(told, "fetch").seconds == pytest.approx(8e-9)
    assert cause(told, "kernel").seconds == pytest.approx(6e-9)


def test_two_lanes_that_are_equally_late_share_the_gap() -> None:
    told = explain_difference(side_lanes(10, 10), side_lanes(20, 20))
    assert [each.share for each in told.lanes] == pytest.approx([0.5, 0.5])


def test_a_kind_that_was_faster_than_predicted_counts_against_the_gap() -> None:
    told = explain_difference(pipeline(fetch=10, kernel=9), pipeline(fetch=20, kernel=2))
    assert told.seconds > 0
    assert cause(told, "kernel").seconds < 0
    assert cause(told, "kernel").share < 0  # type: ignore[operator]  # there is a gap, hence a share


def test_time_between_tasks_is_told_apart_from_the_tasks() -> None:
    told = explain_difference(pipeline(fetch=10, kernel=2), pipeline(fetch=10, kernel=2, pause=5))
    [between] = [each for each in told.causes if each.what == "between tasks"]
    assert between.seconds == pytest.approx(told.seconds) == pytest.approx(15e-9)
    assert told.replayed_seconds[1] == pytest.approx(told.run_seconds[0])
    assert [(wait.kind, wait.lane, wait.times) for wait in told.waits] == [("fetch", "link", 3)]


def test_all_parts_add_up_to_the_gap_of_real_runs() -> None:
    predicted = virtual_run("cgopipe", budgets=FORTY_PERCENT).recording
    measured = realtime_run("cgopipe", budgets=FORTY_PERCENT).recording
    told = explain_difference(predicted, measured)
    assert sum(each.seconds for each in told.causes) == pytest.approx(told.seconds)
    *others, graph = told.causes
    assert graph.what == "graph"
    sizes = [abs(each.seconds) for each in others]
    assert sizes == sorted(sizes, reverse=True)
    assert {each.lane for each in told.causes} >= {"host->gpu", "accelerator", ""}


def test_runs_with_nothing_in_common_differ_by_their_graphs_and_a_run_not_from_itself() -> None:
    told = explain_difference(one_task("fetch", 10), one_task("copy_to_pinned", 30))
    [graph] = [each for each in told.causes if each.seconds]
    assert graph.what == "graph"
    assert graph.seconds == pytest.approx(20e-9)
    run = pipeline(fetch=10, kernel=2)
    assert summarize(run).seconds == pytest.approx(42e-9)
    told = explain_difference(run, run)
    assert told.seconds == 0.0
    assert {(each.seconds, each.share) for each in told.causes} == {(0.0, None)}


def test_the_measured_run_is_explained_by_the_predicted_one_whichever_comes_first_in_words_and_tables() -> (
    None
):
    predicted = run_of_recording("p", pipeline(fetch=10, kernel=2), PREDICTED)
    measured = run_of_recording("m", pipeline(fetch=15, kernel=2), MEASURED)
    for sides, places in (([measured, predicted], (1, 0)), ([predicted, measured], (0, 1))):
        comparison = compare_runs(sides)
        told = comparison.difference
        assert told is not None
        assert told.places == places
        assert told.seconds == pytest.approx(20e-9)
    assert comparison.reasons()[0] == (
        "Without loading, m (measured) took 62 ns and p (predicted) 42 ns: +20 ns (+47.6 %)."
    )
    header, rows = comparison.causes()
    assert header == ["", "lane", "phase", "tasks", "mean, p", "mean, m", "part of the gap", "share"]
    assert rows == [["fetch", "link", "decode", "4", "10 ns", "15 ns", "+20 ns", "+100 %"]]
    header, rows = comparison.lane_causes()
    assert rows[0] == ["link", "40 ns", "60 ns", "+20 ns", "+100 %"]


def test_reports_and_more_than_two_runs_are_not_explained() -> None:
    sides = [run_of_recording(str(length), pipeline(length, 1), MEASURED) for length in (1, 2, 3)]
    assert compare_runs(sides).difference is None
    assert compare_runs(sides).reasons() == []


# -- replayed, and in one trace --------------------------------------------------------------------------------


def test_beside_its_replay_a_run_differs_by_what_passed_between_tasks(tmp_path: Path) -> None:
    measured = pipeline(fetch=10, kernel=2, pause=5)
    write_trace(tmp_path / "run.json", measured, MEASURED)
    comparison = compare_runs([tmp_path / "run.json"], replayed=True)
    assert [(run.title, run.figures) for run in comparison.runs] == [
        ("run.json", "measured"),
        ("run.json replayed", "predicted"),
    ]
    assert comparison.difference is not None
    assert comparison.difference.causes[0].what == "between tasks"
    assert comparison.difference.causes[0].share == pytest.approx(1)


def test_two_runs_stand_in_one_trace_with_decoding_aligned(tmp_path: Path) -> None:
    runs = {
        "predicted": virtual_run("cgopipe", budgets=FORTY_PERCENT),
        "measured": realtime_run("cgopipe", budgets=FORTY_PERCENT),
    }
    for name in ("both.json.gz", "both.json"):
        sides = [run_of_recording(f"{kind}.json", run.recording, run.about) for kind, run in runs.items()]
        compare_runs(sides, trace=tmp_path / name)
        assert check_trace(tmp_path / name) == []
    events = events_of(tmp_path / "both.json")
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == [
        "critical path, predicted and measured",
        *(f"{kind}.json, rank 0: CGOPipe on t4, {kind}" for kind in runs),
    ]
    slices = [event for event in slices_of(events) if event["pid"] > 1]
    assert len(slices) == sum(len(run.recording.slices) for run in runs.values())
    ends = [
        max(
            event["ts"] + event["dur"]
            for event in slices
            if (event["pid"], event["cat"], event["args"]["step"]) == (pid, "sample", 0)
        )
        for pid in (2, 3)
    ]
    assert ends[0] == pytest.approx(ends[1], abs=0.002), (
        "the last sample of prefill ends when decoding starts"
    )


def test_runs_without_a_common_step_are_shown_as_they_were(tmp_path: Path) -> None:
    loading = one_task("load", 10, step=-1)
    sides = [
        run_of_recording("a", loading, PREDICTED),
        run_of_recording("b", one_task("fetch", 10, step=2), MEASURED),
    ]
    compare_runs(sides, trace=tmp_path / "both.json")
    assert check_trace(tmp_path / "both.json") == []


def test_a_trace_of_two_runs_is_not_read_as_one(tmp_path: Path) -> None:
    sides = [run_of_recording(name, pipeline(2, 1), MEASURED) for name in "ab"]
    compare_runs(sides, trace=tmp_path / "both.json")
    with pytest.raises(
        BadInput, match=r"both\.json shows several runs side by side: name the trace of one of them"
    ):
        read_trace(tmp_path / "both.json")


@pytest.mark.parametrize("wanted", [{"replayed": True}, {"trace": "out.json"}])
def test_a_report_can_neither_be_replayed_nor_shown(wanted: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"policy": "P", "tokens": [[1]], "lanes": {}}')
    with pytest.raises(BadInput, match=r"report\.json is a report, and --.* traces: name what --trace wrote"):
        compare_runs([tmp_path / "report.json"] * 2, **wanted)  # type: ignore[arg-type]  # one of each kind


# -- recordings by hand ----------------------------------------------------------------------------------------


def pipeline(fetch: int, kernel: int, pause: int = 0, pages: int = 4) -> Recording:
    """Pages one after another on a link, `pause` nanoseconds apart, and a kernel on each."""
    link, gpu = LaneName(0, "link"), LaneName(0, "gpu")
    slices: list[Slice] = []
    producers: list[tuple[int, ...]] = []
    end = 0
    for page in range(pages):
        start = page * (fetch + pause)
        arrived = start + fetch
        slices.append(slice_of(2 * page, link, "fetch", start, arrived))
        producers.append(())
        end = max(end, arrived) + kernel
        slices.append(slice_of(2 * page + 1, gpu, "kernel", end - kernel, end))
        producers.append((2 * page,))
    return in_order_of_ends([link, gpu], slices, producers)


def side_lanes(one: int, other: int) -> Recording:
    """A task on each of two lanes, at once."""
    lanes = [LaneName(0, "one"), LaneName(0, "other")]
    slices = [slice_of(0, lanes[0], "a", 0, one), slice_of(1, lanes[1], "b", 0, other)]
    return Recording(lanes, slices, [(), ()], [])


def one_task(verb: str, nanoseconds: int, step: int = 1) -> Recording:
    """A task by itself."""
    link = LaneName(0, "link")
    return Recording([link], [slice_of(0, link, verb, 0, nanoseconds, step)], [()], [])


def in_order_of_ends(
    lanes: list[LaneName], slices: list[Slice], producers: list[tuple[int, ...]]
) -> Recording:
    order = sorted(range(len(slices)), key=lambda index: slices[index].end)
    places = {index: place for place, index in enumerate(order)}
    return Recording(
        lanes,
        [slices[index] for index in order],
        [tuple(places[each] for each in producers[index]) for index in order],
        [],
    )


def cause(told: Difference, kind: str) -> Cause:
    """The cause of that kind."""
    [found] = [each for each in told.causes if each.kind == kind]
    return found

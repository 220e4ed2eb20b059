"""Traces: what the file shows, who waited for whom, and what a recording adds up to."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from commands import refused
from moesched.engine import Engine
from moesched.errors import BadInput
from moesched.plugins import make_policy
from moesched.steps.memory import slots_of
from moesched.tasks import Block, Kernel, Lane, Task
from moesched.trace import About, Recorder, check_trace, critical_path, read_trace, summarize, write_trace
from runs import Run, realtime_run, staged_run, virtual_run
from traces import (
    by_hand,
    edges_of,
    events_of,
    kept,
    largest_file,
    ranks_that_meet,
    rewritten,
    run_graph,
    slices_of,
    task,
    tasks_of,
)

POLICIES = ("resident", "layer_streaming", "cgopipe", "adversarial")
ABOUT = About(driver="virtual", policy="by hand")


# -- what is in the file ---------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("simulated", [True, False], ids=["virtual", "realtime"])
def test_the_checker_accepts_what_every_policy_does(policy: str, simulated: bool, tmp_path: Path) -> None:
    run = (virtual_run if simulated else realtime_run)(policy)
    write_trace(tmp_path / "trace.json", run.recording, run.about)
    assert check_trace(tmp_path / "trace.json") == []
    assert run.recording.edges > len(run.recording.slices)


@pytest.mark.parametrize("policy", POLICIES)
def test_both_clocks_show_the_same_slices_and_the_same_flows(policy: str) -> None:
    settings = {"cancels": False} if policy == "adversarial" else {}
    predicted = virtual_run(make_policy(policy, settings)).recording
    measured = realtime_run(make_policy(policy, settings)).recording
    assert tasks_of(predicted) == tasks_of(measured)
    assert edges_of(predicted) == edges_of(measured)


def test_a_trace_that_is_read_back_is_the_recording_that_was_written(
    streamed_run: Run, streamed_trace: Path
) -> None:
    assert read_trace(streamed_trace) == (streamed_run.recording, streamed_run.about)


def test_a_trace_says_what_it_is_of(streamed_trace: Path) -> None:
    other = json.loads(streamed_trace.read_text())["otherData"]
    assert (other["policy"], other["model"], other["machine"]) == ("CGOPipe", "mixtral-0.8b", "t4")
    assert (other["driver"], other["figures"]) == ("virtual", "predicted")
    assert other["plan"] == {"micro_batches": 2}


def test_a_slice_says_what_moved_and_how_fast_and_which_line_asked_for_it(
    streamed_run: Run, streamed_trace: Path
) -> None:
    slices = [event for event in slices_of(events_of(streamed_trace)) if event["pid"] > 1]
    fetch = next(event for event in slices if event["cat"] == "fetch")
    kernel = next(event for event in slices if event["cat"] == "post_attention")
    args = fetch["args"]
    assert fetch["name"] == f"fetch L{args['layer']} E{args['expert']}"
    assert args["type"] == "PageTransfer"
    assert args["bytes"] == args["pages"] * streamed_run.plan.layout.expert(0, 0)[0].nbytes
    assert args["GB/s"] == pytest.approx(args["bytes"] / fetch["dur"] / 1000, rel=1e-3)
    assert re.search(r"cgopipe\.py:\d+$", args["line"])
    args = kernel["args"]
    assert kernel["name"] == f"post_attention L{args['layer']} mb{args['micro_batch']}"
    assert args["GFLOP/s"] == pytest.approx(args["FLOP"] / kernel["dur"] / 1000, rel=1e-3)


def test_tracks_stand_in_the_order_of_the_lanes_below_the_critical_path(
    streamed_run: Run, streamed_trace: Path
) -> None:
    names = [event for event in events_of(streamed_trace) if event["name"] == "thread_name"]
    shown = [event["args"]["name"] for event in sorted(names, key=lambda event: event["tid"])]
    assert shown == ["critical path", *(lane.name for lane in streamed_run.engine.lanes)]


def test_pages_held_grow_with_the_slots_that_are_filled_and_stay_when_they_are_overwritten(
    streamed_run: Run,
) -> None:
    samples = [sample for sample in streamed_run.recording.memory if sample.memory == "gpu"]
    held = [sample.pages for sample in samples]
    slots = [
        slot
        for pool in [*streamed_run.plan.weights.resident, *streamed_run.plan.weights.pools]
        for slot in slots_of(pool)
        if slot.memory == "gpu"
    ]
    assert held[0] == 0
    assert held == sorted(held)
    assert held[-1] == sum(slot.nbytes for slot in slots)
    assert {sample.reserved for sample in samples} == {streamed_run.plan.memories["gpu"].used}


def test_a_trace_is_gzipped_only_when_its_name_says_so(
    streamed_run: Run, streamed_trace: Path, tmp_path: Path
) -> None:
    packed = tmp_path / "trace.json.gz"
    write_trace(packed, streamed_run.recording, streamed_run.about)
    assert gzip.decompress(packed.read_bytes()) == streamed_trace.read_bytes()
    assert check_trace(packed) == []
    assert read_trace(packed) == read_trace(streamed_trace)


def test_two_runs_of_the_same_seed_give_the_same_bytes(
    streamed_run: Run, streamed_trace: Path, tmp_path: Path
) -> None:
    again = staged_run()
    for name in ("a.json.gz", "b.json.gz"):
        write_trace(tmp_path / name, again.recording, again.about)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == streamed_trace.read_bytes()


def test_a_run_without_tasks_has_a_good_trace(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.watch(Engine([Lane("gpu")]))
    kept(recorder.recording(), ABOUT, tmp_path)
    assert summarize(recorder.recording()).seconds == 0.0


# -- graphs by hand --------------------------------------------------------------------------------------


def test_an_edge_through_joins_becomes_one_from_every_real_producer() -> None:
    def graph(engine: Engine) -> None:
        copies, gpu = engine.lanes
        slots, view = [Block("slot 0"), Block("slot 1")], Block("view")
        for slot in slots:
            engine.submit(task(copies, "fetch"), (), (slot,))
        engine.join(slots, (view,))
        for _ in range(2):
            engine.submit(task(gpu, "kernel"), (view,))
        readers_done = engine.join((), (view,))
        slots[0].readers.append(readers_done)
        engine.submit(task(copies, "overwrite"), (), (slots[0],))

    recording = run_graph(graph, ["copies", "gpu"])
    assert [each.task.verb for each in recording.slices] == [
        "fetch",
        "fetch",
        "kernel",
        "kernel",
        "overwrite",
    ]
    # The kernels wait for both fetches, and whoever overwrites a slot for both kernels and the fetch before.
    assert [sorted(each) for each in recording.producers[:4]] == [[], [], [0, 1], [0, 1]]
    assert set(recording.producers[4]) >= {2, 3}
    assert recording.joins == 2


def test_a_task_lists_all_that_it_depends_on_and_has_an_arrow_from_the_last_of_each_lane(
    tmp_path: Path,
) -> None:
    def graph(engine: Engine) -> None:
        copies, gpu = engine.lanes
        pages, hidden = [Block("page 0"), Block("page 1")], Block("hidden")
        for length, page in zip((5, 9), pages, strict=True):
            engine.submit(task(copies, "fetch", length), (), (page,))
        engine.submit(task(gpu, "attention", 20), (), (hidden,))
        engine.submit(task(gpu, "experts"), (*pages, hidden))

    write_trace(tmp_path / "trace.json", run_graph(graph, ["copies", "gpu"]), ABOUT)
    events = events_of(tmp_path / "trace.json")
    [experts] = [event for event in events if event["name"] == "experts" and event["pid"] > 1]
    assert experts["args"]["depends_on"] == [0, 1, 2]
    # The second fetch ends at 14 ns and attention at 20 ns; an arrow starts in the last nanosecond of its task.
    assert [event["ts"] for event in events if event["ph"] == "s"] == [0.013, 0.019]
    assert [event["ts"] for event in events if event["ph"] == "f"] == [0.020, 0.020]


def test_the_critical_path_says_what_each_task_waited_for_last() -> None:
    graph = by_hand(
        "gpu: short 10; copies: fetch 50 writes s; gpu: first 20 reads s writes r; gpu: second 5 writes a"
    )
    recording = run_graph(graph, ["copies", "gpu"], "in_order")
    hops = critical_path(recording)
    assert [(hop.slice.task.verb, hop.wait.why, hop.gap) for hop in hops] == [
        ("fetch", "start", 0),
        ("first", "data", 0),
        ("second", "lane", 0),
    ]


def test_the_critical_path_crosses_ranks_where_a_collective_waited_for_another_rank(tmp_path: Path) -> None:
    recording = ranks_that_meet(10, 90)
    hops = [(hop.slice.task.verb, hop.slice.lane.rank, hop.wait.why) for hop in critical_path(recording)]
    assert hops == [("compute", 1, "start"), ("all_reduce", 0, "rank"), ("after", 0, "data")]
    events = kept(recording, ABOUT, tmp_path)
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == [
        "critical path, predicted",
        "rank 0: by hand, predicted",
        "rank 1: by hand, predicted",
    ]


def test_a_failed_task_is_shown_as_failed_and_a_cancelled_one_is_not_shown(tmp_path: Path) -> None:
    def graph(engine: Engine) -> None:
        [gpu] = engine.lanes
        hidden = Block("hidden")
        engine.submit(task(gpu, "good"), (), (hidden,))
        engine.submit(task(gpu, "bad"), (hidden,), (hidden,))
        engine.submit(task(gpu, "never"), (hidden,), (hidden,))

    def perform(task: Task) -> None:
        if task.verb == "bad":
            raise RuntimeError("no")

    recording = run_graph(graph, ["gpu"], perform={Kernel: perform})
    assert [(each.task.verb, each.state) for each in recording.slices] == [
        ("good", "done"),
        ("bad", "failed"),
    ]
    kept(recording, ABOUT, tmp_path)
    assert summarize(recording).failed == 1


def test_labels_and_paths_of_any_characters_survive(tmp_path: Path) -> None:
    verb = 'say "hé\\llo"\n\u2028, 世界'
    kept(run_graph(lambda engine: engine.submit(task(engine.lanes[0], verb)), ['la"ne']), ABOUT, tmp_path)


# -- figures ---------------------------------------------------------------------------------------------


def test_a_summary_adds_up_to_the_run(streamed_run: Run, streamed_trace: Path) -> None:
    summary = summarize(streamed_run.recording)
    assert summary == summarize(read_trace(streamed_trace).recording)
    assert summary.tasks == len(streamed_run.recording.slices) == sum(kind.tasks for kind in summary.kinds)
    assert summary.seconds == streamed_run.recording.end / 1e9
    assert [step.step for step in summary.steps] == [-1, 0, 1, 2]
    assert [step.end for step in summary.steps[1:]] == [
        end / 1e9 for end in streamed_run.generation.step_ends
    ]
    assert [before.end for before in summary.steps[:-1]] == [after.start for after in summary.steps[1:]]


def test_lanes_count_what_ran_after_loading(streamed_run: Run) -> None:
    summary = summarize(streamed_run.recording)
    window = (streamed_run.recording.end - streamed_run.generation.loaded) / 1e9
    for lane in summary.lanes:
        slices = [
            each for each in streamed_run.recording.slices if each.lane.name == lane.lane and each.step >= 0
        ]
        busy = sum(each.end - each.start for each in slices) / 1e9
        assert lane.busy_seconds == pytest.approx(busy)
        assert lane.utilization == pytest.approx(busy / window)
        assert lane.nbytes == sum(each.task.nbytes for each in slices)


def test_rates_of_a_kind_are_those_while_it_ran(streamed_run: Run) -> None:
    [fetch] = [kind for kind in summarize(streamed_run.recording).kinds if kind.kind == "fetch"]
    assert fetch.gigabytes_per_second == pytest.approx(12, rel=0.01)  # the T4's link, less its latency
    assert fetch.nbytes == sum(
        each.task.nbytes for each in streamed_run.recording.slices if each.task.verb == "fetch"
    )


# -- files that cannot be written --------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full; this system has none")
def test_a_full_disk_is_said_in_one_line(streamed_run: Run) -> None:
    with pytest.raises(
        BadInput, match=r"^cannot write trace /dev/full: No space left on device: free some space"
    ):
        write_trace("/dev/full", streamed_run.recording, streamed_run.about)
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_disk_that_fills_while_writing_leaves_what_was_there_before(
    name: str, streamed_run: Run, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(b"before")
    with largest_file(4096), pytest.raises(BadInput, match="File too large: raise the limit"):
        write_trace(path, streamed_run.recording, streamed_run.about)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ("missing/trace.json", "No such file or directory: make its folder first"),
        ("file/trace.json", "Not a directory: a part of its path is a file"),
        ("folder", "Is a directory: it is a folder: name a file in it"),
    ],
)
def test_a_place_that_cannot_be_written_to_is_named(
    place: str, complaint: str, streamed_run: Run, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput, match=re.escape(f"cannot write trace {tmp_path / place}: {complaint}")):
        write_trace(tmp_path / place, streamed_run.recording, streamed_run.about)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]


def test_a_link_to_a_trace_stays_a_link(streamed_run: Run, tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "trace.json")
    write_trace(tmp_path / "link.json", streamed_run.recording, streamed_run.about)
    assert (tmp_path / "link.json").is_symlink()
    assert check_trace(tmp_path / "trace.json") == []


# -- tasks without time ------------------------------------------------------------------------------------------------


NOTHING = msgspec.Raw(b"0.000")


@pytest.fixture
def other(streamed_trace: Path) -> Path:
    """A copy of a trace, to change."""
    return Path(shutil.copy(streamed_trace, streamed_trace.with_name("other.json")))


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", "{other}"),
        ("explain", "{other}", "--report", "{folder}/report.html"),
        ("compare", "{other}", "{trace}"),
        ("compare", "{trace}", "{other}"),
        ("compare", "{other}", "--replayed"),
        ("timeline", "{other}", "--out", "{folder}/picture.svg"),
    ],
)
def test_a_trace_whose_tasks_all_last_nothing_is_refused(
    command: Any, streamed_trace: Path, other: Path, arguments: tuple[str, ...]
) -> None:
    with rewritten(other) as events:
        for each in slices_of(events):
            each["ts"] = each["dur"] = NOTHING
    places = {"trace": streamed_trace, "other": other, "folder": other.parent}
    said = command(*(each.format(**places) for each in arguments))
    refused(said, "the trace is damaged: all of its tasks last nothing; record it again")


@pytest.mark.parametrize("name", ["load", "post_attention", "attention", "sample"])
def test_a_kind_of_tasks_may_last_nothing(command: Any, streamed_trace: Path, other: Path, name: str) -> None:
    with rewritten(other) as events:
        for each in slices_of(events):
            if each["name"].split()[0] == name:
                each["dur"] = NOTHING
    assert command("explain", other).code == 0
    both = other.with_name("both.json")
    for pair in ((streamed_trace, other), (other, streamed_trace)):
        assert command("compare", *pair, "--trace", both).code == 0

"""Traces: what recorders keep, what the file shows, and that the checker finds every way in which one can be wrong."""

from __future__ import annotations

import gzip
import json
import re
import resource
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from moesched.drivers.virtual import VirtualDriver
from moesched.engine import Engine
from moesched.errors import BadInput, TaskFailed
from moesched.plugins import make_policy
from moesched.runs import simulate
from moesched.seams import Demand
from moesched.tasks import Block, Collective, Kernel, Lane, PageTransfer, Task, Work
from moesched.trace import (
    About,
    LastSteps,
    Recorder,
    Recording,
    check_trace,
    critical_path,
    read_trace,
    summarize,
    write_trace,
)
from runs import FORTY_PERCENT, Run, make_plan, realtime_run, virtual_run

POLICIES = ("resident", "layer_streaming", "cgopipe", "adversarial")
ABOUT = About(driver="virtual", policy="by hand")

Event = dict[str, Any]


@pytest.fixture(scope="module")
def run() -> Run:
    """CGOPipe under 40 % of the weights: every kind of lane, transfers in two hops, views of many pages."""
    return virtual_run("cgopipe", budgets=FORTY_PERCENT)


@pytest.fixture
def trace(run: Run, tmp_path: Path) -> Path:
    """The file of that run."""
    path = tmp_path / "trace.json"
    write_trace(path, run.recording, run.about)
    return path


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
    predicted, measured = virtual_run(policy).recording, realtime_run(policy).recording
    assert tasks_of(predicted) == tasks_of(measured)
    assert edges_of(predicted) == edges_of(measured)


def test_a_trace_that_is_read_back_is_the_recording_that_was_written(run: Run, trace: Path) -> None:
    assert read_trace(trace) == (run.recording, run.about)


def test_a_trace_says_what_it_is_of(trace: Path) -> None:
    other = json.loads(trace.read_text())["otherData"]
    assert (other["policy"], other["model"], other["machine"]) == ("CGOPipe", "mixtral-0.8b", "t4")
    assert (other["driver"], other["figures"]) == ("virtual", "predicted")
    assert other["plan"] == {"micro_batches": 2}


def test_a_slice_says_what_moved_and_how_fast_and_which_line_asked_for_it(run: Run, trace: Path) -> None:
    slices = [event for event in slices_of(events_of(trace)) if event["pid"] > 1]
    fetch = next(event for event in slices if event["cat"] == "fetch")
    kernel = next(event for event in slices if event["cat"] == "post_attention")
    args = fetch["args"]
    assert fetch["name"] == f"fetch L{args['layer']} E{args['expert']}"
    assert args["type"] == "PageTransfer"
    assert args["bytes"] == args["pages"] * run.plan.layout.expert(0, 0)[0].nbytes
    assert args["GB/s"] == pytest.approx(args["bytes"] / fetch["dur"] / 1000, rel=1e-3)
    assert re.search(r"cgopipe\.py:\d+$", args["line"])
    args = kernel["args"]
    assert kernel["name"] == f"post_attention L{args['layer']} mb{args['micro_batch']}"
    assert args["GFLOP/s"] == pytest.approx(args["flops"] / kernel["dur"] / 1000, rel=1e-3)


def test_tracks_stand_in_the_order_of_the_lanes_below_the_critical_path(run: Run, trace: Path) -> None:
    names = [event for event in events_of(trace) if event["name"] == "thread_name"]
    shown = [event["args"]["name"] for event in sorted(names, key=lambda event: event["tid"])]
    assert shown == ["critical path", *(lane.name for lane in run.engine.lanes)]


def test_pages_held_grow_with_the_slots_that_are_filled_and_stay_when_they_are_overwritten(run: Run) -> None:
    samples = [sample for sample in run.recording.memory if sample.memory == "gpu"]
    held = [sample.pages for sample in samples]
    slots = [
        slot for pool in [*run.plan.kept, *run.plan.pools] for slot in pool.slots if slot.memory == "gpu"
    ]
    assert held[0] == 0
    assert held == sorted(held)
    assert held[-1] == sum(slot.nbytes for slot in slots)
    assert {sample.reserved for sample in samples} == {run.plan.memories["gpu"].used}


def test_a_trace_is_gzipped_only_when_its_name_says_so(run: Run, trace: Path, tmp_path: Path) -> None:
    packed = tmp_path / "trace.json.gz"
    write_trace(packed, run.recording, run.about)
    assert gzip.decompress(packed.read_bytes()) == trace.read_bytes()
    assert check_trace(packed) == []
    assert read_trace(packed) == read_trace(trace)


def test_two_runs_of_the_same_seed_give_the_same_bytes(run: Run, trace: Path, tmp_path: Path) -> None:
    again = virtual_run("cgopipe", budgets=FORTY_PERCENT)
    for name in ("a.json.gz", "b.json.gz"):
        write_trace(tmp_path / name, again.recording, again.about)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
    assert gzip.decompress((tmp_path / "a.json.gz").read_bytes()) == trace.read_bytes()


def test_a_run_without_tasks_has_a_good_trace(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.watch(Engine([Lane("gpu")]))
    write_trace(tmp_path / "trace.json", recorder.recording(), ABOUT)
    assert check_trace(tmp_path / "trace.json") == []
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
    assert [each.verb for each in recording.slices] == ["fetch", "fetch", "kernel", "kernel", "overwrite"]
    # The kernels wait for both fetches, and whoever overwrites a slot for both kernels and the fetch before.
    assert [sorted(each) for each in recording.producers[:4]] == [[], [], [0, 1], [0, 1]]
    assert set(recording.producers[4]) >= {2, 3}
    assert recording.joins == 2


def test_the_critical_path_says_what_each_task_waited_for_last() -> None:
    def graph(engine: Engine) -> None:
        copies, gpu = engine.lanes
        slot, result = Block("slot"), Block("result")
        engine.submit(task(gpu, "short", 10))
        engine.submit(task(copies, "fetch", 50), (), (slot,))
        engine.submit(task(gpu, "first", 20), (slot,), (result,))
        engine.submit(task(gpu, "second", 5), (), (Block("another"),), after=())

    recording = run_graph(graph, ["copies", "gpu"], "in_order")
    hops = critical_path(recording)
    assert [(hop.task.verb, hop.why, hop.gap) for hop in hops] == [
        ("fetch", "start", 0),
        ("first", "data", 0),
        ("second", "lane", 0),
    ]


def test_the_critical_path_crosses_ranks_where_a_collective_waited_for_another_rank(tmp_path: Path) -> None:
    recorder = Recorder()
    engines = [Engine([Lane("gpu"), Lane("network")]) for _ in range(2)]
    for engine in engines:
        recorder.watch(engine)

    async def rank(engine: Engine, nanoseconds: int) -> None:
        gpu, network = engine.lanes
        hidden = Block("hidden")
        engine.submit(task(gpu, "compute", nanoseconds), (), (hidden,))
        reduce = Collective(
            network, Work("all_reduce", "network", nanoseconds=7), "all_reduce", signature="sum"
        )
        engine.collective(reduce, (hidden,), (hidden,))
        engine.submit(task(gpu, "after", 3 if nanoseconds == 10 else 1), (hidden,))

    run_ranks(engines, recorder, rank(engines[0], 10), rank(engines[1], 90))
    recording = recorder.recording()
    hops = [(hop.task.verb, hop.task.lane.rank, hop.why) for hop in critical_path(recording)]
    assert hops == [("compute", 1, "start"), ("all_reduce", 0, "rank"), ("after", 0, "data")]
    write_trace(tmp_path / "trace.json", recording, ABOUT)
    assert check_trace(tmp_path / "trace.json") == []
    processes = [
        event["args"]["name"]
        for event in events_of(tmp_path / "trace.json")
        if event["name"] == "process_name"
    ]
    assert processes == [
        "critical path, predicted",
        "rank 0: by hand, predicted",
        "rank 1: by hand, predicted",
    ]
    assert read_trace(tmp_path / "trace.json").recording == recording


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
    assert [(each.verb, each.state) for each in recording.slices] == [("good", "done"), ("bad", "failed")]
    write_trace(tmp_path / "trace.json", recording, ABOUT)
    assert check_trace(tmp_path / "trace.json") == []
    assert summarize(read_trace(tmp_path / "trace.json").recording).failed == 1


def test_labels_and_paths_of_any_characters_survive(tmp_path: Path) -> None:
    verb = 'say "hé\\llo"\n\u2028, 世界'
    recording = run_graph(lambda engine: engine.submit(task(engine.lanes[0], verb)), ['la"ne'])
    write_trace(tmp_path / "trace.json", recording, ABOUT)
    assert check_trace(tmp_path / "trace.json") == []
    assert read_trace(tmp_path / "trace.json").recording == recording


# -- the bounded recorder --------------------------------------------------------------------------------


def test_a_bounded_recorder_keeps_the_last_steps_as_the_whole_one_shows_them(tmp_path: Path) -> None:
    whole = virtual_run("cgopipe", budgets=FORTY_PERCENT, new_tokens=6).recording
    last = virtual_run("cgopipe", LastSteps(2), budgets=FORTY_PERCENT, new_tokens=6)
    kept = last.recording
    assert kept.trimmed
    assert kept.slices == [each for each in whole.slices if each.step >= 4]
    ids = {each.id for each in kept.slices}
    assert edges_by_id(kept) == {edge for edge in edges_by_id(whole) if set(edge) <= ids}
    assert kept.joins < whole.joins
    write_trace(tmp_path / "trace.json", kept, last.about)
    assert check_trace(tmp_path / "trace.json") == []
    assert read_trace(tmp_path / "trace.json").recording == kept


def test_a_bounded_recorder_remembers_which_slots_were_filled_before(run: Run) -> None:
    kept = virtual_run("cgopipe", LastSteps(1), budgets=FORTY_PERCENT).recording
    assert {(sample.memory, sample.pages) for sample in kept.memory} == {
        (sample.memory, sample.pages) for sample in run.recording.memory if sample.time == run.recording.end
    }


def test_a_bounded_recorder_that_has_room_for_all_steps_keeps_all(run: Run) -> None:
    assert virtual_run("cgopipe", LastSteps(4), budgets=FORTY_PERCENT).recording == run.recording


def test_a_task_that_ends_after_its_step_was_dropped_does_not_come_back() -> None:
    recorder = LastSteps(1)
    engine = Engine([Lane("gpu"), Lane("copies")])
    recorder.watch(engine)
    gpu, copies = engine.lanes
    slot = Block("slot", 64, "fast")
    late = PageTransfer(copies, Work("copy", "link"), "late", step=0, start=0, end=9, slots=(slot,))
    for each in (task(gpu, "early", step=0), task(gpu, "next", step=1), late):
        recorder.ended(each)
    assert [each.verb for each in recorder.recording().slices] == ["next"]
    assert {sample.pages for sample in recorder.recording().memory} == {64}


def test_a_bounded_recorder_of_no_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="ask for 1 or more"):
        LastSteps(0)


@pytest.mark.parametrize("policy", ["resident", "layer_streaming", "cgopipe"])
@pytest.mark.parametrize("steps", [None, 2])
def test_a_replayed_run_has_the_trace_of_one_that_was_not(policy: str, steps: int | None) -> None:
    recordings = []
    for replay in (False, True):
        recorder = Recorder() if steps is None else LastSteps(steps)
        chosen = make_policy(policy)
        simulate(make_plan(chosen, new_tokens=7), chosen, replay=replay, recorder=recorder)
        recordings.append(recorder.recording())
    built, replayed = recordings
    assert timetable(replayed) == timetable(built)
    assert edges_by_id(replayed) == edges_by_id(built)
    assert summarize(replayed).steps == summarize(built).steps


# -- figures ---------------------------------------------------------------------------------------------


def test_a_summary_adds_up_to_the_run(run: Run, trace: Path) -> None:
    summary = summarize(run.recording)
    assert summary == summarize(read_trace(trace).recording)
    assert summary.tasks == len(run.recording.slices) == sum(kind.tasks for kind in summary.kinds)
    assert summary.seconds == run.recording.end / 1e9
    assert [step.step for step in summary.steps] == [-1, 0, 1, 2]
    assert [step.end for step in summary.steps[1:]] == [end / 1e9 for end in run.generation.step_ends]
    assert [before.end for before in summary.steps[:-1]] == [after.start for after in summary.steps[1:]]


def test_lanes_count_what_ran_after_loading(run: Run) -> None:
    summary = summarize(run.recording)
    window = (run.recording.end - run.generation.loaded) / 1e9
    for lane in summary.lanes:
        slices = [each for each in run.recording.slices if each.lane.name == lane.lane and each.step >= 0]
        busy = sum(each.end - each.start for each in slices) / 1e9
        assert lane.busy_seconds == pytest.approx(busy)
        assert lane.utilization == pytest.approx(busy / window)
        assert lane.nbytes == sum(each.nbytes for each in slices)


def test_rates_of_a_kind_are_those_while_it_ran(run: Run) -> None:
    [fetch] = [kind for kind in summarize(run.recording).kinds if kind.kind == "fetch"]
    assert fetch.gigabytes_per_second == pytest.approx(12, rel=0.01)  # the T4's link, less its latency
    assert fetch.nbytes == sum(each.nbytes for each in run.recording.slices if each.verb == "fetch")


# -- the checker, each rule damaged once -----------------------------------------------------------------


def change(number: int, /, **fields: Any) -> Callable[[list[Event]], object]:
    """Change fields of the slice of that place (in order of the file); None removes a field."""

    def damage(events: list[Event]) -> None:
        fill(slices_of(events)[number], fields)

    return damage


def change_first(ph: str, name: str = "", /, **fields: Any) -> Callable[[list[Event]], object]:
    """Change fields of the first event of a phase (and name)."""

    def damage(events: list[Event]) -> None:
        fill(next(event for event in events if event["ph"] == ph and name in ("", event["name"])), fields)

    return damage


def fill(event: Event, fields: dict[str, Any]) -> None:
    """Set fields of an event; None removes one."""
    for name, value in fields.items():
        if value is None:
            del event[name]
        else:
            event[name] = value


def drop(ph: str) -> Callable[[list[Event]], object]:
    """Remove the first event of a phase."""
    return lambda events: events.remove(next(event for event in events if event["ph"] == ph))


def drop_a_flow(events: list[Event]) -> None:
    """Remove both ends of one flow."""
    events[:] = [event for event in events if event.get("id") != 5]


def repeat_a_flow(events: list[Event]) -> None:
    """Draw one edge twice, in place of another."""
    for ph in "sf":
        source = next(event for event in events if event["ph"] == ph and event["id"] == 1)
        events[:] = [event for event in events if event["ph"] != ph or event["id"] != 2] + [
            {**source, "id": 2}
        ]


def turn_a_flow(events: list[Event]) -> None:
    """Draw one edge from its consumer to its producer."""
    start, end = (next(event for event in events if event["ph"] == ph and event["id"] == 1) for ph in "sf")
    for name in ("pid", "tid", "ts"):
        start[name], end[name] = end[name], start[name]


def show_a_join(events: list[Event]) -> None:
    """Give one slice the type of a join."""
    slices_of(events)[30]["args"]["type"] = "Join"


def repeat_a_task(events: list[Event]) -> None:
    """Let two slices of a process be the same task."""
    slices_of(events)[30]["args"] = slices_of(events)[31]["args"]


def swap_tids(events: list[Event]) -> None:
    """Show the second lane above the first."""
    places = [event for event in events if event["name"] == "thread_sort_index"]
    places[1]["args"], places[2]["args"] = places[2]["args"], places[1]["args"]


def drop_the_critical_path(events: list[Event]) -> None:
    """Leave the critical path out."""
    events[:] = [event for event in events if event["ph"] != "X" or event["pid"] != 1]


DAMAGES: dict[str, tuple[Callable[[list[Event]], object], str]] = {
    "two decimals": (change(3, ts=msgspec.Raw(b"12.25")), "ts: time 12.25 has not exactly three decimals"),
    "no decimals": (change(3, dur=msgspec.Raw(b"12")), "dur: time 12 has not exactly three decimals"),
    "a float": (change(3, ts=msgspec.Raw(b"1.5e3")), "time 1.5e3 has not"),
    "no time": (change_first("s", ts=None), "time missing has not"),
    "a text as pid": (change(3, pid="2"), "is no trace of moesched: Expected `int`, got `str`"),
    "a nameless process": (change_first("M", "process_name", name="other"), "process 1 has no process_name"),
    "a nameless track": (change_first("M", "thread_name", tid=99), "track 1 of process 1 has no thread_name"),
    "a track without a place": (
        change_first("M", "thread_sort_index", name="other"),
        "track 1 of process 1 has no thread_sort_index",
    ),
    "tracks out of order": (swap_tids, "tids do not stand in the order"),
    "an overlap": (change(3, dur=msgspec.Raw(b"99999999.000")), "before load"),
    "a flow that starts nowhere": (
        change_first("s", ts=msgspec.Raw(b"0.000"), tid=3),
        "its start at 0.000 on track 3 lies in no slice",
    ),
    "a flow that ends nowhere": (
        change_first("f", ts=msgspec.Raw(b"99999999.000")),
        "its end at 99999999.000 on track",
    ),
    "a flow on the wrong process": (change_first("s", pid=7), "lies in no slice"),
    "a flow without bp": (change_first("f", bp=None), 'lacks "bp":"e"'),
    "a flow with two ids": (change_first("f", id=999_999), "flow 999999 has 0 starts and 1 ends"),
    "a flow backwards": (turn_a_flow, "flow 1 ends before it starts"),
    "half a flow": (drop("f"), "flow 1 has 1 starts and 0 ends"),
    "a flow less": (drop_a_flow, "flows stand for"),
    "a flow twice": (repeat_a_flow, "2 flows for one edge"),
    "a slice less": (drop("X"), "slices stand for"),
    "a join": (show_a_join, "is a join that was not expanded"),
    "a task twice": (repeat_a_task, "has several slices"),
    "a slice without args": (change(3, args={}), "Object missing required field `task`"),
    "no critical path": (drop_the_critical_path, "the critical path is missing"),
    "a critical path elsewhere": (
        change(-1, dur=msgspec.Raw(b"0.001")),
        "is no task's slice",
    ),
    "a negative counter": (
        change_first("C", args={"reserved": -1, "pages": 0}),
        "reserved is -1, not a number of bytes",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_the_checker_finds(name: str, trace: Path) -> None:
    damage, complaint = DAMAGES[name]
    with rewritten(trace) as events:
        damage(events)
    problems = check_trace(trace)
    assert any(complaint in problem for problem in problems), problems


def test_the_checker_finds_what_is_no_trace(tmp_path: Path, trace: Path) -> None:
    whole = trace.read_bytes()
    packed = gzip.compress(whole)
    files = {
        "cut.json": (whole[:-1000], "is no trace of moesched: Input data was truncated"),
        "cut.json.gz": (packed[:-1000], "end-of-stream"),
        "bytes.json": (b"\xff\x00", "is no trace of moesched"),
        "other.json": (b'{"traceEvents":[]}', "missing required field `otherData`"),
        "newer.json": (whole.replace(b"trace 1", b"trace 9"), "its format is 'moesched trace 9'"),
    }
    for name, (data, complaint) in files.items():
        (tmp_path / name).write_bytes(data)
        [problem] = check_trace(tmp_path / name)
        assert str(tmp_path / name) in problem
        assert complaint in problem
    [problem] = check_trace(tmp_path / "nowhere.json")
    assert "No such file" in problem


def test_the_checker_names_some_and_counts_the_others(run: Run, trace: Path) -> None:
    with rewritten(trace) as events:
        for event in events:
            event.pop("bp", None)
    problems = check_trace(trace)
    assert len(problems) == 6
    assert problems[-1] == f"... and {run.recording.edges - 5} more like the last"


def test_a_damaged_trace_is_refused_when_it_is_read(trace: Path) -> None:
    with rewritten(trace) as events:
        change_first("f", ts=msgspec.Raw(b"99999999.000"))(events)
    with pytest.raises(BadInput, match="is damaged: flow 1 has an end outside all slices: record it again"):
        read_trace(trace)


# -- files that cannot be written ------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full; this system has none")
def test_a_full_disk_is_said_in_one_line(run: Run) -> None:
    with pytest.raises(
        BadInput, match=r"^cannot write trace /dev/full: No space left on device: free some space"
    ):
        write_trace("/dev/full", run.recording, run.about)
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_disk_that_fills_while_writing_leaves_what_was_there_before(
    name: str, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(b"before")
    with largest_file(4096), pytest.raises(BadInput, match="File too large: raise the limit"):
        write_trace(path, run.recording, run.about)
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
    place: str, complaint: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput, match=re.escape(f"cannot write trace {tmp_path / place}: {complaint}")):
        write_trace(tmp_path / place, run.recording, run.about)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]


def test_a_link_to_a_trace_stays_a_link(run: Run, tmp_path: Path) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "trace.json")
    write_trace(tmp_path / "link.json", run.recording, run.about)
    assert (tmp_path / "link.json").is_symlink()
    assert check_trace(tmp_path / "trace.json") == []


# -- helpers ---------------------------------------------------------------------------------------------


class _Free:
    """Costs nothing but the nanoseconds that a task brings with it."""

    def work(self, work: Work) -> Demand:
        return Demand(1e-9, ())


def task(lane: Lane, verb: str, nanoseconds: int = 1, step: int = -1) -> Kernel:
    """A task of known length; its times stand as if it had run alone."""
    work = Work(verb, lane.name, nanoseconds=nanoseconds)
    return Kernel(lane, work, verb, step=step, start=0, end=nanoseconds)


def run_graph(
    graph: Callable[[Engine], object], lanes: list[str], discipline: Any = "ready_first", perform: Any = None
) -> Recording:
    """Run what `graph` submits on the virtual clock."""
    engine = Engine([Lane(name, discipline) for name in lanes])
    recorder = Recorder()
    recorder.watch(engine)

    async def main() -> None:
        graph(engine)

    run_ranks([engine], recorder, main(), perform=perform)
    return recorder.recording()


def run_ranks(
    engines: list[Engine], recorder: Recorder, *mains: Coroutine[Any, Any, None], perform: Any = None
) -> None:
    """Run one coroutine per rank; a failed task is no error here."""
    driver = VirtualDriver(engines, _Free(), perform=perform, observers=[recorder])
    with suppress(TaskFailed):
        driver.run(*mains)


def tasks_of(recording: Recording) -> list[tuple[Any, ...]]:
    """All that a recording says of its tasks but their times."""
    return sorted(
        (each.id, each.lane, each.label, each.type, each.kind, each.step, each.nbytes, each.flops, each.line)
        for each in recording.slices
    )


def timetable(recording: Recording) -> list[tuple[int, str, str, int, int, int]]:
    """Which task ran where and when."""
    return sorted(
        (each.id, each.label, each.lane.name, each.step, each.start, each.end) for each in recording.slices
    )


def edges_of(recording: Recording) -> list[tuple[str, str, int, int]]:
    """All edges, by the labels and steps of their ends."""
    slices = recording.slices
    return sorted(
        (slices[producer].label, consumer.label, slices[producer].step, consumer.step)
        for consumer, producers in zip(slices, recording.producers, strict=True)
        for producer in producers
    )


def edges_by_id(recording: Recording) -> set[tuple[int, int]]:
    """All edges, by the ids of their ends."""
    slices = recording.slices
    return {
        (slices[producer].id, consumer.id)
        for consumer, producers in zip(slices, recording.producers, strict=True)
        for producer in producers
    }


def events_of(path: Path) -> list[Event]:
    """All events of a trace, decoded."""
    events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return events


def slices_of(events: list[Event]) -> list[Event]:
    """The slices; those of the critical path come last."""
    return [event for event in events if event["ph"] == "X"]


@contextmanager
def rewritten(path: Path) -> Iterator[list[Event]]:
    """The events of a trace, to change; the rest of the file and the form of its numbers stay."""
    content = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
    events: list[Event] = [
        {
            name: value if name in ("ts", "dur") else msgspec.json.decode(value)
            for name, value in event.items()
        }
        for event in msgspec.json.decode(content["traceEvents"], type=list[dict[str, msgspec.Raw]])
    ]
    yield events
    content["traceEvents"] = msgspec.Raw(msgspec.json.encode(events))
    path.write_bytes(msgspec.json.encode(content))


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Let the system refuse to write more than so many bytes to one file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

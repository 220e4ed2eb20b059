"""The parts of a run's time: causes of idle time, the critical path, the bottleneck, and `moesched explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commands import SIMULATE, refused
from moesched.analysis.explanation import Explanation, explain
from moesched.analysis.explanation_tables import bottleneck_in_words, tables_of
from moesched.engine import Engine
from moesched.errors import BadInput
from moesched.tasks import Block, Task
from moesched.trace import About, read_trace, write_trace
from runs import FORTY_PERCENT, realtime_run, virtual_run
from traces import by_hand, fetch, ranks_that_meet, run_graph, task

T = TypeVar("T", bound=Task)

ABOUT = About(driver="virtual", policy="by hand")


def explained(graph: str) -> Explanation:
    """The explanation of a graph by hand on lanes in program order."""
    names = [*dict.fromkeys(each.split()[0][:-1] for each in graph.split(";"))]
    return explain(run_graph(by_hand(graph), names, "in_order"), ABOUT)


def causes(explanation: Explanation, lane: str) -> list[tuple[str, str, int]]:
    """The causes of a lane's idle time, with the kind of task and the nanoseconds."""
    return [(each.cause, each.kind, round(each.seconds * 1e9)) for each in explanation.lanes[lane].causes]


def test_a_lane_waits_for_data_that_another_lane_brings_and_for_the_queue_there() -> None:
    told = explained("link: fetch 30 writes a; link: fetch_next 50 writes b; gpu: kernel 20 reads b")
    assert causes(told, "gpu") == [("data", "fetch_next", 50), ("lane", "fetch", 30)]
    assert causes(told, "link") == [("finished", "", 20)]
    [span] = told.lanes["gpu"].longest
    assert (span.cause, span.waited_for, span.before) == ("data", "fetch_next, step -1", "kernel, step -1")
    assert told.bottleneck is not None
    assert (told.bottleneck.lane, told.bottleneck.kind) == ("link", "fetch_next")
    assert told.bottleneck.seconds == pytest.approx(80e-9)
    said = bottleneck_in_words(told, told.bottleneck)
    assert said.startswith("link, 80 ns of the critical path (80%), 50 ns of it fetch_next. ")


def test_a_link_without_room_waits_for_the_budget() -> None:
    told = explained(
        "link: fetch 10 writes s; gpu: kernel 70 reads s; link: fetch 10 writes s; gpu: kernel 60 reads s"
    )
    assert causes(told, "link") == [("budget", "kernel", 70), ("finished", "", 60)]
    assert causes(told, "gpu") == [("data", "fetch", 20)]
    assert [(part.kind, part.cause) for part in told.critical_path] == [
        ("kernel", "budget"),
        ("kernel", "data"),
        ("fetch", "data"),
    ]


def test_what_waits_behind_a_budget_on_another_lane_waits_for_data() -> None:
    told = explained(
        "gpu: kernel 70 reads s; link: fetch 10 writes s; gpu: after 20 reads s writes r; back: offload 5 reads r"
    )
    assert causes(told, "link")[0] == ("budget", "kernel", 70)
    assert causes(told, "back") == [("budget", "kernel", 70), ("data", "after", 20), ("data", "fetch", 10)]
    [span] = told.lanes["back"].longest
    assert span.waited_for == "after, step -1"


def test_what_a_policy_submits_once_it_knows_the_router_waits_for_the_router() -> None:
    async def policy(engine: Engine) -> None:
        gpu, link = engine.lanes
        page, hidden = Block("page"), Block("hidden")
        engine.submit(task(gpu, "attention", 15), (), (hidden,))
        await engine.submit(task(gpu, "route", 25), (hidden,))
        engine.submit(task(link, "fetch", 40), (), (page,))
        engine.submit(task(gpu, "expert", 10), (page,))

    told = explain(run_graph(policy, ["gpu", "link"], "in_order"), ABOUT)
    assert causes(told, "link") == [
        ("router", "route", 25),
        ("router", "attention", 15),
        ("finished", "", 10),
    ]
    assert [(part.kind, part.cause) for part in told.critical_path] == [
        ("fetch", "data"),
        ("route", "router"),
        ("attention", "data"),
        ("expert", "data"),
    ]


def test_a_collective_waits_for_the_rank_that_comes_last() -> None:
    told = explain(ranks_that_meet(10, 90), ABOUT)
    assert causes(told, "rank 0 network")[0] == ("rank", "compute", 90)
    assert causes(told, "rank 1 network")[0] == ("data", "compute", 90)
    assert told.bottleneck is not None
    assert told.bottleneck.lane == "rank 1 gpu"


def test_overlap_and_time_alone_are_those_of_the_lanes() -> None:
    told = explained("link: fetch 30; gpu: kernel 100")
    assert told.overlap == pytest.approx(1.3)
    assert [lane.alone_seconds for lane in told.lanes.values()] == pytest.approx([0.0, 70e-9])


def test_a_stream_that_waits_for_launches_is_told_from_one_that_computes(tmp_path: Path) -> None:
    def submit(engine: Engine) -> None:
        for verb in ("attention", "experts"):
            engine.submit(task(engine.lanes[0], verb, 50))

    recording = run_graph(submit, ["gpu"])
    recording.slices[1].launching = 45
    write_trace(tmp_path / "trace.json", recording, ABOUT)
    told = explain(read_trace(tmp_path / "trace.json").recording, ABOUT)
    assert told.lanes["gpu"].launching_seconds == pytest.approx(45e-9)
    assert tables_of(told)["Lanes"].columns[3:] == ["busy", "launching", "idle"]
    assert told.bottleneck is not None
    assert "launched kernels" not in bottleneck_in_words(told, told.bottleneck)
    recording.slices[0].launching = 30
    told = explain(recording, ABOUT)
    assert told.bottleneck is not None
    assert "In 75% of that the host still launched kernels" in bottleneck_in_words(told, told.bottleneck)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 40), st.sets(st.integers(0, 4)), st.integers(0, 4), st.booleans()),
        min_size=1,
        max_size=25,
    )
)  # fmt: skip
def test_causes_add_up_to_the_idle_time_of_each_lane_in_any_graph(
    chosen: list[tuple[int, int, set[int], int, bool]],
) -> None:
    async def policy(engine: Engine) -> None:
        blocks = [Block(f"block {number}") for number in range(5)]
        for lane, nanoseconds, reads, writes, waits in chosen:
            submitted = engine.submit(
                task(engine.lanes[lane], "route" if waits else "kernel", nanoseconds),
                [blocks[number] for number in reads - {writes}],
                (blocks[writes],),
            )
            if waits:
                await submitted

    assert_adds_up(explain(run_graph(policy, ["one", "two", "three"], "in_order"), ABOUT))


def assert_adds_up(told: Explanation) -> None:
    for lane in told.lanes.values():
        assert sum(each.seconds for each in lane.causes) == pytest.approx(lane.idle_seconds)
        assert lane.busy_seconds + lane.idle_seconds == pytest.approx(told.seconds)
    assert sum(part.seconds for part in told.critical_path) == pytest.approx(told.seconds, rel=1e-3)


@given(st.lists(st.integers(-40, 40), min_size=6, max_size=6))
def test_causes_add_up_where_clocks_of_nodes_disagree(shifts: list[int]) -> None:
    recording = ranks_that_meet(10, 90)
    for each, shift in zip(recording.slices, shifts, strict=True):
        each.start = max(0, each.start + shift)
        each.end = max(each.start + 1, each.end + shift)
    recording.slices[-1].end = 1000
    for lane in explain(recording, ABOUT).lanes.values():
        assert sum(each.seconds for each in lane.causes) == pytest.approx(lane.idle_seconds)


@pytest.mark.parametrize("policy", ["cgopipe", "expert_cache", "hybrimoe", "prefetch_gate"])
def test_all_time_of_a_run_has_a_cause(policy: str) -> None:
    run = virtual_run(policy, budgets=FORTY_PERCENT)
    assert_adds_up(explain(run.recording, run.about))


def test_where_tasks_take_no_time_the_policy_and_the_driver_take_all() -> None:
    run = realtime_run("cgopipe", budgets=FORTY_PERCENT)
    for each in run.recording.slices:
        each.end = each.start + 1  # on a busy machine one may have taken long
    told = explain(run.recording, run.about)
    assert told.figures == "measured"
    assert told.bottleneck is not None
    assert told.bottleneck.cause in ("policy", "host")
    assert any(each.dispatch_seconds for each in told.handovers)


def test_a_policy_that_computes_between_tasks_is_the_bottleneck_and_its_line_is_named() -> None:
    async def policy(engine: Engine) -> None:
        [gpu] = engine.lanes
        for _ in range(3):
            await engine.submit(task(gpu, "kernel", 10))

    recording = run_graph(policy, ["gpu"], "in_order")
    late = 0
    for each in recording.slices:
        late += 90
        each.start += late
        each.end += late
        each.submit_delay = 90
        each.line = "my_policy.py:7"
    told = explain(recording, ABOUT)
    assert causes(told, "gpu") == [("policy", "kernel", 270)]
    assert told.bottleneck is not None
    assert (told.bottleneck.cause, told.bottleneck.line) == ("policy", "my_policy.py:7")
    assert told.bottleneck.share == pytest.approx(0.9)


def test_time_of_the_driver_is_not_blamed_on_a_lane_that_is_called_host() -> None:
    async def policy(engine: Engine) -> None:
        gpu, host = engine.lanes
        for lane, nanoseconds in ((gpu, 50), (host, 40)):
            await engine.submit(task(lane, "kernel", nanoseconds))

    recording = run_graph(policy, ["gpu", "host"], "in_order")
    last = recording.slices[-1]
    last.start, last.end, last.dispatch = last.start + 30, last.end + 30, 30
    told = explain(recording, ABOUT).bottleneck
    assert told is not None
    assert (told.lane, told.kind) == ("gpu", "kernel")


@pytest.mark.parametrize(
    ("fetch_time", "kernel_time", "cause"), [(60, 50, "budget"), (60, 90, "budget"), (100, 20, "data")]
)
def test_the_bottleneck_is_what_would_save_most_if_it_were_relieved(
    fetch_time: int, kernel_time: int, cause: str
) -> None:
    """With room, both overlap: that saves the shorter of the two. A link of twice the rate saves half of its time."""
    told = explained(
        "; ".join([f"link: fetch {fetch_time} writes s; gpu: kernel {kernel_time} reads s"] * 20)
    ).bottleneck
    assert told is not None
    assert told.cause == cause
    saved = min(fetch_time, kernel_time) if cause == "budget" else fetch_time / 2
    assert told.saved == pytest.approx(saved / (fetch_time + kernel_time), rel=0.06)


@pytest.mark.parametrize(
    ("experts", "pages", "slots", "cause", "saved"),
    [(3, 1, 2, "budget", 0.85), (3, 1, 1, "lane", 0.5), (1, 0, 2, "lane", 0.5)],
    ids=["twice the slots", "twice the slots are too few", "a fetch of no pages"],
)
def test_a_pool_is_blamed_for_experts_that_one_of_twice_the_slots_would_keep(
    experts: int, pages: int, slots: int, cause: str, saved: float
) -> None:
    async def policy(engine: Engine) -> None:
        link, gpu = engine.lanes
        for turn in range(30):
            page = Block("page")
            engine.submit(of_expert(turn % experts, fetch(link, "fetch", 50)), (), (page,))
            engine.submit(of_expert(turn % experts, task(gpu, "run_expert", 5)), (page,))

    recording = run_graph(policy, ["link", "gpu"], "in_order")
    for each in recording.slices:
        if each.task.pages:
            each.task = msgspec.structs.replace(each.task, pages=pages, pool_slots=slots)
    told = explain(recording, ABOUT).bottleneck
    assert told is not None
    assert (told.kind, told.cause) == ("fetch", cause)
    assert told.saved == pytest.approx(saved, abs=0.05)


def test_a_router_that_fetches_wait_for_is_the_bottleneck() -> None:
    async def policy(engine: Engine) -> None:
        gpu, link = engine.lanes
        hidden = Block("hidden")
        for _ in range(10):
            page = Block("page")
            await engine.submit(task(gpu, "route", 50), (), (hidden,))
            engine.submit(task(link, "fetch", 50), (), (page,))
            engine.submit(task(gpu, "expert", 5), (hidden, page), (hidden,))

    told = explain(run_graph(policy, ["gpu", "link"], "in_order"), ABOUT).bottleneck
    assert told is not None
    assert (told.cause, told.kind) == ("router", "route")


def test_a_slow_exchange_is_the_bottleneck_although_each_rank_has_its_part() -> None:
    told = explain(ranks_that_meet(10, 10, exchange=200), ABOUT).bottleneck
    assert told is not None
    assert (told.kind, told.lane.partition(" network")[1]) == ("all_reduce", " network")
    assert told.saved == pytest.approx(0.48, abs=0.02)


def test_a_network_s_time_on_the_critical_path_is_that_of_all_ranks_in_each_figure(
    command: Any, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.json"
    job = (
        "--machine",
        "m2-ultra",
        "--nodes",
        2,
        "--network",
        "10gbe",
        "--workload",
        "uniform",
        "--batch-size",
        1,
    )
    model = ("--model", "mixtral-0.8b", "--policy", "ep_balanced", "--gen", 4)
    command("simulate", *model, *job, "--trace", trace)
    told = command("explain", trace, "--json").json
    found = told["bottleneck"]
    on_path = [each for each in told["critical_path"] if each["lane"].endswith("network")]
    assert {each["lane"] for each in on_path} == {"rank 0 network", "rank 1 network"}
    assert {each["kind"] for each in on_path} == {"all_reduce"}
    assert found["ranks"] == 2
    assert found["seconds"] == pytest.approx(sum(each["seconds"] for each in on_path))
    assert found["kind_seconds"] == pytest.approx(found["seconds"])
    assert f"bottleneck: all_reduce on {found['lane']} and 1 more, " in command("explain", trace).out


def test_nothing_that_ran_cannot_be_explained() -> None:
    with pytest.raises(BadInput, match="the trace has no tasks"):
        explain(run_graph(lambda engine: None, ["gpu"]), ABOUT)
    recording = run_graph(lambda engine: engine.submit(task(engine.lanes[0], "kernel", 1)), ["gpu"])
    recording.slices[0].end = recording.slices[0].start
    with pytest.raises(BadInput, match="the tasks of the trace take no time"):
        explain(recording, ABOUT)


def test_the_command_says_what_matters_in_its_first_ten_lines(command: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    command(*SIMULATE, "--policy", "cgopipe", "--batch-size", 4, "--gen", 3, "--trace", trace)
    first, second, *rest = command("explain", trace).out.splitlines()
    assert first.startswith("cgopipe on mixtral-0.8b, predicted on t4: ")
    assert second.startswith("bottleneck: ")
    assert rest[:2] == ["", "What would help"]
    assert "would save" in rest[2]
    said = command("explain", trace, "--json").json
    assert said["bottleneck"].keys() >= {"lane", "kind", "cause"}
    for lane in said["lanes"].values():
        assert sum(each["seconds"] for each in lane["causes"]) == pytest.approx(lane["idle_seconds"])
    assert said["critical_path"][0].keys() >= {"kind", "lane", "seconds"}
    for pool in said["pools"].values():
        assert pool.keys() >= {"hits", "misses", "wasted_prefetches"}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"traceEvents": [], "otherData": {"version": "perf"}}', r"trace\.json is not a trace of moesched"),
        (
            '{"model": "m", "machine": "t4", "lanes": {}}',
            "is a report, and not a trace: name the file that --trace wrote",
        ),
        ('{"traceEvents": [{"ph": "X"', r"trace\.json is not a trace of moesched"),
        (
            '{"traceEvents": [], "otherData": {"format": "moesched trace 1", "tasks": 0, "edges": 0}}',
            "its format is 'moesched trace 1', not",
        ),
    ],
)
def test_a_file_that_is_no_trace_of_this_version_is_refused(
    content: str, told: str, command: Any, tmp_path: Path
) -> None:
    file = tmp_path / "trace.json"
    file.write_text(content)
    refused(command("explain", file), told)


def of_expert(expert: int, made: T) -> T:
    """A task of an expert of the first layer."""
    made.layer, made.expert = 0, expert
    return made

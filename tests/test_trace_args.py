"""The args of slices that only a finished run knows, and transfers that were cancelled."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesched.drivers.capture import NotFixed
from moesched.engine import Engine
from moesched.models.layout import Page
from moesched.policies.layer_streaming import LayerStreaming
from moesched.runs.simulation import simulate
from moesched.steps.model_pages import describe_all
from moesched.steps.step import Step
from moesched.tasks import Lane, PageTransfer
from moesched.trace import (
    About,
    LastSteps,
    Recorder,
    Recording,
    check_trace,
    merge_recordings,
    summarize,
    write_trace,
)
from moesched.work import Work
from runs import FORTY_PERCENT, Run, make_plan, realtime_run, virtual_run
from traces import events_of, kept, rewritten, run_graph, run_ranks, task

ABOUT = About(driver="virtual", policy="by hand")
CHOSEN_PER_TOKEN = 2


@pytest.fixture(scope="module")
def routed() -> Run:
    """A run whose policy awaits routers and runs experts one by one."""
    return virtual_run("expert_cache", budgets=FORTY_PERCENT)


# -- experts, rows and pages -----------------------------------------------------------------------------


def test_a_router_s_slice_names_the_chosen_experts_with_their_rows(routed: Run, tmp_path: Path) -> None:
    routers = [each for each in routed.recording.slices if each.task.verb == "route"]
    for each in routers:
        assert each.experts is not None
        assert sum(each.experts.values()) == CHOSEN_PER_TOKEN * each.task.rows
    events = kept(routed.recording, routed.about, tmp_path)
    shown = [event["args"] for event in events if event.get("cat") == "route"]
    told = [
        {int(expert): rows for expert, rows in args["experts"].items()} for args in shown if "type" in args
    ]
    assert told == [each.experts for each in routers]


def test_an_expert_s_slice_has_the_rows_that_its_router_chose_it_for(routed: Run) -> None:
    slices = routed.recording.slices
    chosen = {
        (each.step, each.task.layer, each.task.micro_batch, expert): rows
        for each in slices
        for expert, rows in (each.experts or {}).items()
    }
    ran = {
        (each.step, each.task.layer, each.task.micro_batch, each.task.expert): each.task.rows
        for each in slices
        if each.task.verb == "run_expert"
    }
    assert ran == chosen


def test_a_transfer_names_all_of_its_pages(streamed_run: Run, streamed_trace: Path) -> None:
    transfers = [each.task for each in streamed_run.recording.slices if each.task.pages > 1]
    joined = next(each for each in transfers if len(each.page_names.split("E")) > 2)
    assert joined.page_names.startswith(f"L{joined.layer} ")
    shown = {event["args"].get("page_names") for event in events_of(streamed_trace) if event["ph"] == "X"}
    assert joined.page_names in shown


def test_transfers_that_begin_alike_name_their_own_pages() -> None:
    first, second, third = (Page(number, 0, number, 0, (), 64) for number in range(3))
    work = Work("copy", "link", nanoseconds=5)

    def graph(engine: Engine) -> None:
        for pages in ((first, second), (first, third)):
            engine.submit(PageTransfer(engine.lanes[0], work, "fetch", layer=0, expert=0, pages=pages))

    names = [each.task.page_names for each in run_graph(graph, ["link"]).slices]
    assert names == ["L0 E0 #0, E1 #0", "L0 E0 #0, E2 #0"]


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        ([], ""),
        ([(3, 5, 0)], "L3 E5 #0"),
        ([(3, 5, 2), (3, 5, 0), (3, 5, 1), (3, 5, 4)], "L3 E5 #0-2,4"),
        ([(3, -1, 0), (3, -1, 1), (3, 0, 0), (4, 0, 1)], "L3 dense #0-1, E0 #0; L4 E0 #1"),
    ],
)
def test_pages_are_named_by_layer_and_expert(pages: list[tuple[int, int, int]], words: str) -> None:
    made = [Page(number, *place, (), 64) for number, place in enumerate(pages)]
    assert describe_all(made) == words


# -- cancelled transfers ---------------------------------------------------------------------------------


def cancelling(recorder: Recorder | LastSteps) -> Recording:
    """Two steps, each of which cancels a transfer behind another one, 5 ns after it was submitted."""
    engine = Engine([Lane("gpu"), Lane("link")])
    recorder.watch(engine)

    async def policy() -> None:
        gpu, link = engine.lanes
        for step in (0, 1):
            engine.submit(task(link, "busy", 20, step))
            waiting = engine.submit(task(link, "unwanted", 20, step))
            await engine.submit(task(gpu, "kernel", 5, step))
            assert engine.cancel(waiting)
            await engine.submit(task(gpu, "long", 20, step))

    run_ranks([engine], recorder, policy())
    return recorder.recording()


def test_a_cancelled_transfer_is_an_instant_on_its_lane_at_the_time_of_its_end(tmp_path: Path) -> None:
    recording = cancelling(Recorder())
    told = [(each.task.verb, each.lane.name, each.step, each.time) for each in recording.cancelled]
    assert told == [("unwanted", "link", 0, 5), ("unwanted", "link", 1, 30)]
    assert summarize(recording).cancelled == 2
    events = kept(recording, ABOUT, tmp_path)
    instants = [(event["name"], event["ts"]) for event in events if event["ph"] == "i"]
    assert instants == [("cancelled unwanted", 0.005), ("cancelled unwanted", 0.030)]


def test_the_checker_counts_cancelled_transfers(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, cancelling(Recorder()), ABOUT)
    with rewritten(path) as events:
        events.remove(next(event for event in events if event["ph"] == "i"))
    assert check_trace(path) == ["1 instants stand for 2 cancelled tasks"]


def test_a_bounded_recorder_forgets_what_was_cancelled_in_earlier_steps() -> None:
    assert [each.step for each in cancelling(LastSteps(1)).cancelled] == [1]


def test_cancelled_transfers_of_several_nodes_stand_on_one_clock() -> None:
    one, other = cancelling(Recorder()), cancelling(Recorder())
    other.origin = 7
    merged = merge_recordings({0: one, 1: other}, {})
    assert [(each.lane.rank, each.time) for each in merged.cancelled] == [(0, 5), (1, 12), (0, 30), (1, 37)]


class Cancelling(LayerStreaming):
    """Prefetches a page behind each layer's first one, and cancels it before the first one has arrived."""

    def __init__(self) -> None:
        self.unfinished = threading.Lock()

    def _fetch(self, step: Step, i: int) -> None:
        first, second, *others = step.pages(i)
        with self.unfinished:
            step.fetch([first], self.buffer)
            step.fetch([second], self.buffer, speculative=True)
            assert step.cancel([second], self.buffer)
        step.fetch([second, *others], self.buffer)


def cancelling_realtime_run() -> Run:
    policy = Cancelling()
    return realtime_run(policy, unfinished=policy.unfinished)


@pytest.mark.parametrize("run", [lambda: virtual_run(Cancelling()), cancelling_realtime_run])
def test_a_prefetch_that_is_cancelled_in_each_layer_of_each_step_is_recorded(run: Callable[[], Run]) -> None:
    ended = run()
    steps, layers = 3, ended.plan.layout.config.layers
    cancelled = Counter(each.task.layer for each in ended.recording.cancelled)
    assert cancelled == dict.fromkeys(range(layers), steps)
    agree_with_the_pools(ended.recording)


@pytest.mark.parametrize("run", [virtual_run, realtime_run])
def test_every_cancelled_page_of_a_run_is_recorded(run: Any) -> None:
    agree_with_the_pools(run("adversarial").recording)


def agree_with_the_pools(recording: Recording) -> None:
    """Check that the cancelled transfers have the pages that the pools counted, and a time within the run."""
    last = {sample.pool: sample.counted for sample in recording.pools}
    assert sum(each.task.pages for each in recording.cancelled) == sum(
        each.cancelled for each in last.values()
    )
    for each in recording.cancelled:
        assert 0 <= each.time <= recording.end


def test_a_run_that_cancels_is_not_replayed_as_if_it_did_not() -> None:
    policy = Cancelling()
    with pytest.raises(NotFixed):
        simulate(make_plan(policy), policy, replay=True)

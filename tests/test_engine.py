"""The engine: which tasks start when, what a failure or a cancelled task takes with it, and its checking mode."""

from __future__ import annotations

import gc
import sys
import weakref

import pytest

from benchmarks.shared.small_runs import TWO_MEMORIES
from engine_script import WORK, Script
from engine_stories import follow
from moesched.drivers.validation import (
    BrokenRule,
    CheckedEngine,
    CheckedSharedEngine,
    new_engine,
    new_shared_engine,
)
from moesched.engine import Engine
from moesched.errors import TaskCancelled, TaskFailed
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import make_lanes, plan_run
from moesched.tasks import DEMAND, IDLE, PREFETCH, Block, Discipline, HostKernel, Kernel, Lane
from small_models import SMALL

LATE = "link stream; gpu stream; link: late writes x; issue late"
"""A task runs on a stream; `both` waits for it there, and `next` overwrites what both of them use."""

STORIES = {
    # data
    "a reader starts when the writer is done":
        "link: fetch writes w; gpu: matmul reads w; started fetch; end fetch; started matmul",
    "readers of the same value run beside each other":
        "link: fetch writes w; gpu: left reads w; cpu: right reads w; end fetch; started fetch left right",
    "a writer waits for all readers of what it overwrites":
        "gpu: left reads w; cpu: right reads w; link: fetch writes w; end left; started left right;"
        "end right; started fetch",
    "a writer waits for the writer before it":
        "gpu: first writes w; link: second writes w; started first; end first; started second",
    "a reader waits for the last writer before it and for no later one":
        "link: old writes w; gpu: reader reads w; link: new writes w; end old; started old reader;"
        "end reader; started new",
    "a change in place is a read and a write":
        "a: make writes x; b: change reads x writes x; c: use reads x; run make change use",
    "a task may read a block twice and write it twice":
        "gpu: make writes xx; cpu: change reads xx writes xx; gpu: again reads x writes x; run make change again",
    "order by hand holds where the data says nothing":
        "gpu: first; cpu: second after first; started first; end first; started second",
    "order by hand behind a task that has ended is met":
        "gpu: first; end first; cpu: second after first; started first second",
    "a join stands for many and takes no lane":
        "link: one writes a; disk: other writes b; join ab into v; gpu: kernel reads v; end other;"
        "started one other; end one; started kernel",
    # lanes
    "a lane runs one task at a time":
        "gpu: first; gpu: second; started first; end first; started second",
    "an in-order lane waits for its first task though a later one is ready":
        "gpu in order; link: fetch writes w; gpu: needs reads w; gpu: free; started fetch; end fetch;"
        "end needs; started needs free",
    "a ready-first lane goes on with what is ready":
        "link: fetch writes w; gpu: needs reads w; gpu: free; started fetch free",
    "a ready-first lane takes the earliest of a class":
        "gpu: running; link: fetch writes w; gpu: earlier reads w; gpu: later; end fetch; end running;"
        "started running fetch earlier",
    "lifting a transfer that waits for its lane moves it ahead":
        "link: running; link: one idle; link: other idle; lift other; run running other one",
    "lifting a transfer that waits for data counts once it is ready":
        "link: running; cpu: data writes x; link: one prefetch; link: other reads x idle; lift other;"
        "end data; end running; started running data other",
    # failures
    "what needs a failed result is cancelled and what only follows goes on":
        "link: fetch writes w; gpu: needs reads w writes y; gpu: then reads y; cpu: overwrites writes w;"
        "fail fetch; started fetch overwrites; fetch is failed; needs is cancelled; then is cancelled",
    "a cancelled task settles only after all before it, so that storage is free when it says so":
        "link: fetch writes w; cpu: reader reads x; gpu: writer reads w writes x; link: next writes x;"
        "fail fetch; writer is waiting; started fetch reader; end reader; writer is cancelled; started next",
    "an in-order lane goes on past a task that a failure elsewhere cancelled":
        "gpu in order; link in order; link: fetch writes w; gpu: needs reads w; gpu: free; fail fetch;"
        "started fetch free",
    "overwriting heals what a cancelled task spoiled":
        "link: busy; link: fetch writes w; cancel fetch; link: again writes w; gpu: reader reads w;"
        "run busy again reader",
    "a join hands a failure on":
        "link: one writes a; disk: other writes b; join ab into v; gpu: kernel reads v; fail one;"
        "kernel is waiting; end other; kernel is cancelled",
    # cancelled tasks
    "a task that waits for its lane can be cancelled and never runs":
        "link: running; link: unwanted; link: wanted; cancel unwanted; unwanted is cancelled;"
        "run running wanted",
    "a task that waits for data is cancelled once the data is there":
        "gpu in order; link: fetch writes w; gpu: unwanted reads w; gpu: wanted; cancel unwanted;"
        "unwanted is waiting; run fetch wanted",
    "a task on an in-order lane that runs or has ended cannot be cancelled":
        "gpu in order; gpu: task; cannot cancel task; end task; cannot cancel task; task is done",
    "a task on a ready-first lane that runs or has ended cannot be cancelled":
        "gpu: task; cannot cancel task; end task; cannot cancel task; task is done",
    "a task is cancelled once":
        "gpu: running; gpu: task; cancel task; cannot cancel task",
    "halting cancels what has not started and lets the rest end":
        "gpu in order; link: fetch writes w; gpu: kernel reads w; link: ahead; halt; ahead is cancelled;"
        "end fetch; kernel is cancelled; started fetch; over",
    "what is submitted to a halted engine is cancelled":
        "gpu in order; halt; gpu: late; late is cancelled; over",
    # streams of one device
    "a task is issued behind one on another stream that has not ended":
        "gpu stream; link stream; link: fetch writes w; gpu: matmul reads w; started fetch; issue fetch;"
        "started matmul; matmul waits for fetch",
    "a task waits once for another one that it shares many blocks with, issued before it or afterwards":
        "gpu stream; link stream; link: first writes abc; issue first; link: second writes def;"
        "gpu: matmul reads abcdef writes abcdef; issue second; started first second matmul;"
        "matmul waits for first second",
    "a task off the device waits for the end":
        "link stream; link: fetch writes w; cpu: expert reads w; issue fetch; started fetch; end fetch;"
        "started expert",
    "a stream runs ahead of its progress by its depth":
        "gpu stream; gpu: a; gpu: b; gpu: c; gpu: d; issue a; issue b; started a b; end a; started c",
    "a task whose end is heard of early settles behind those it waited for on the device":
        "gpu stream; link stream; link: fetch writes w; gpu: matmul reads w writes y; cpu: read reads y;"
        "issue fetch; issue matmul; end matmul; matmul is issued; end fetch; started fetch matmul read",
    "a failure on the device spoils what was issued behind it":
        "gpu stream; link stream; link: fetch writes w; gpu: matmul reads w; issue fetch; issue matmul;"
        "fail fetch; end matmul; matmul is cancelled; over",
    "a task that a failure cancels settles only after what it waited for on the device":
        f"{LATE}; cpu: input writes y; gpu: both reads xy writes x; disk: next writes x; fail input;"
        "both is waiting; started late input; end late; both is cancelled; started next",
    "a ready task that is cancelled settles only after what it waited for on the device":
        f"{LATE}; gpu: busy; gpu: both reads x writes x; disk: next writes x; both is ready; cancel both;"
        "started late busy; end late; both is cancelled; started next",
    "halting waits for the device too":
        f"{LATE}; gpu: busy; gpu: both reads x writes x; halt; both is waiting; issue busy; end busy;"
        "end late; both is cancelled; over",
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_of_tasks(story: str) -> None:
    follow(story)


def test_edges_of_ended_tasks_are_still_told_for_the_trace() -> None:
    script = Script(gpu="ready_first", link="ready_first")
    fetch = script.submit("fetch", "link", writes="w")
    script.finish("fetch")
    assert script.submit("matmul", "gpu", reads="w").deps == [fetch.id]


def test_lifting_to_a_less_urgent_class_or_a_running_task_does_nothing() -> None:
    script = Script(link="ready_first")
    script.submit("running", "link", urgency=PREFETCH)
    script.submit("waiting", "link", urgency=PREFETCH)
    keys = [task.key for task in script.tasks.values()]
    script.engine.promote(script.tasks["running"], DEMAND)
    script.engine.promote(script.tasks["waiting"], IDLE)
    assert [task.key for task in script.tasks.values()] == keys


def test_an_accelerator_runs_ahead_further_than_its_copies() -> None:
    batch = split_batch([3, 4], 2, 1)
    plan = plan_run(TWO_MEMORIES, weight_layout(SMALL, "float32"), batch, make_policy("resident"))
    lanes = make_lanes(plan, {"accelerator": "stream", "host->gpu": "stream"})
    assert (lanes["accelerator"].depth, lanes["host->gpu"].depth) == (8, 2)
    assert (lanes["accelerator"].depth_in_order, lanes["host->gpu"].depth_in_order) == (64, 2)


def test_a_stream_gets_more_tasks_than_its_depth_only_in_program_order() -> None:
    gpu, host = Lane("gpu", domain="device", depth=2, depth_in_order=4), Lane("host")
    engine, mask = CheckedEngine([gpu, host]), Block("mask")
    on_host = engine.submit(HostKernel(host, WORK, "on the host"), (), (mask,))
    for name in ("first", "second"):
        engine.submit(Kernel(gpu, WORK, name))
    engine.submit(Kernel(gpu, WORK, "needs the host"), (mask,))
    for name in ("fourth", "fifth", "sixth"):
        engine.submit(Kernel(gpu, WORK, name))

    def issued() -> list[str]:
        names = []
        while gpu.running is not None:
            names.append(gpu.running.verb)
            engine.issued(gpu.running)
        return names

    assert issued() == ["first", "second"]
    engine.finish(on_host)
    assert issued() == ["needs the host", "fourth"]


@pytest.mark.parametrize("discipline", ["in_order", "ready_first"])
def test_a_run_that_failed_leaves_no_lane_in_memory(discipline: Discipline) -> None:
    def fail() -> None:
        gpu, host = Lane("lane of a failed run", discipline, domain="device"), Lane("host")
        engine, mask = Engine([gpu, host]), Block("mask")
        on_host = engine.submit(HostKernel(host, WORK, "on the host"), (), (mask,))
        engine.submit(Kernel(gpu, WORK, "needs the host"), (mask,))
        engine.fail(on_host, ValueError("no memory"))
        engine.forget()

    fail()
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Lane and "failed run" in each.name]


def test_a_task_that_a_policy_cancelled_is_not_kept_for_the_end_of_the_run() -> None:
    link = Lane("link")
    engine = Engine([link])
    engine.submit(HostKernel(link, WORK, "running"))
    unwanted = engine.submit(HostKernel(link, WORK, "unwanted"))
    engine.cancel(unwanted)
    with pytest.raises(TaskCancelled, match="unwanted was cancelled before it started"):
        unwanted.__await__().send(None)
    cause = weakref.ref(unwanted.cause)
    del unwanted
    gc.collect()
    assert cause() is None


# -- errors --------------------------------------------------------------------------------------------------------


def test_a_task_that_reads_what_failed_or_was_cancelled_has_that_as_its_cause() -> None:
    script = Script(gpu="ready_first", link="ready_first")
    script.submit("fetch", "link", writes="w")
    script.submit("unwanted", "link", writes="x")
    script.cancel("unwanted")
    needs = script.submit("needs that", "gpu", reads="x")
    assert script.state("needs that") == "cancelled" and isinstance(needs.cause, TaskCancelled)
    needs = script.submit("needs it", "gpu", reads="w")
    script.fail("fetch")
    assert script.state("needs it") == "cancelled" and isinstance(needs.cause, TaskFailed)


def test_a_failure_is_raised_at_the_next_submission() -> None:
    script = Script(gpu="ready_first")
    script.submit("kernel", "gpu")
    script.fail("kernel")
    with pytest.raises(TaskFailed, match="kernel failed on lane gpu after waiting for nothing"):
        script.submit("next", "gpu")


def test_a_task_whose_error_has_no_readable_text_fails_like_others() -> None:
    class Unreadable(Exception):
        def __repr__(self) -> str:
            raise RuntimeError("the device is lost")

    lane = Lane("gpu")
    engine = CheckedEngine([lane])
    task = engine.submit(Kernel(lane, WORK, "kernel"))
    engine.fail(task, Unreadable())
    assert "Unreadable, whose text cannot be read" in str(engine.failure)
    engine.check_over()


def test_the_story_of_a_failure_names_the_line_that_submitted_the_task() -> None:
    lane = Lane("gpu")
    engine = CheckedEngine([lane])
    task = Kernel(lane, WORK, "kernel", 3, 1)
    here = sys._getframe()
    task.code, task.instruction = here.f_code, here.f_lasti
    engine.submit(task)
    engine.fail(task, ValueError("no memory"))
    assert isinstance(engine.failure, TaskFailed)
    assert "kernel L3 mb1 failed on lane gpu" in str(engine.failure)
    assert "no memory" in str(engine.failure)
    assert task.line.startswith(__file__)


@pytest.mark.parametrize("end", ["halted", "failed"])
def test_a_chain_of_thousands_settles_without_recursion(end: str) -> None:
    script = Script(gpu="ready_first")
    for number in range(3000):
        script.submit(f"change {number}", "gpu", reads="x" if end == "failed" else "", writes="x")
    if end == "failed":
        script.fail("change 0")
    else:
        script.engine.halt(TaskCancelled("stopped"))
        script.finish("change 0")
    assert script.state("change 2999") == "cancelled"
    script.engine.check_over()


# -- the checking mode ---------------------------------------------------------------------------------------------


def test_every_run_of_a_test_is_checked() -> None:
    assert isinstance(new_engine([]), CheckedEngine)
    assert isinstance(new_shared_engine([]), CheckedSharedEngine)


def test_the_checking_mode_notices_a_task_that_ends_without_having_run_and_what_never_ended() -> None:
    script = Script(gpu="ready_first")
    script.submit("first", "gpu")
    script.submit("second", "gpu")
    with pytest.raises(BrokenRule, match="second"):
        script.finish("second")
    script = Script(gpu="ready_first")
    script.submit("first", "gpu")
    with pytest.raises(BrokenRule, match="never settled"):
        script.engine.check_over()


def test_the_checking_mode_notices_a_lost_edge() -> None:
    script = Script(gpu="ready_first", link="ready_first")
    script.submit("fetch", "link", writes="w")
    script.submit("matmul", "gpu", reads="w")
    script.tasks["matmul"].waits = 0
    with pytest.raises(BrokenRule):
        script.finish("fetch")


@pytest.mark.parametrize("promoted", [False, True])
def test_the_checking_mode_notices_a_task_that_overtakes_a_more_urgent_one(promoted: bool) -> None:
    script = Script(link="ready_first")
    for name in ("running", "first", "second", "third"):
        script.submit(name, "link", urgency=IDLE)
    if promoted:
        script.engine.promote(script.tasks["second"], DEMAND)
    script.lanes["link"].heap.reverse()
    overtaken = "second" if promoted else "first"
    with pytest.raises(BrokenRule, match=f"third .* started before .* {overtaken} .* more urgent"):
        script.finish("running")

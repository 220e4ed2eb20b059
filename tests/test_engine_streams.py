"""The engine with streams of one device: tasks are issued ahead of their inputs' ends."""

from __future__ import annotations

from benchmarks.shared.small_runs import TWO_MEMORIES
from engine_script import Script
from moesched.errors import TaskCancelled
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import make_lanes, plan_run
from moesched.seams import LaneKind
from small_models import SMALL


def test_a_task_is_issued_behind_one_on_another_stream_that_has_not_ended() -> None:
    script = Script(gpu="stream", link="stream")
    script.submit("fetch", "link", writes="w")
    matmul = script.submit("matmul", "gpu", reads="w")
    assert script.started() == ["fetch"]
    script.issue("fetch")
    assert script.started() == ["matmul"]
    assert matmul.after == [script.tasks["fetch"]]


def test_a_task_waits_once_for_another_one_that_it_shares_many_blocks_with() -> None:
    """Issued before it is submitted, or afterwards."""
    script = Script(gpu="stream", link="stream")
    script.submit("first", "link", writes="abc")
    script.issue("first")
    script.submit("second", "link", writes="def")
    matmul = script.submit("matmul", "gpu", reads="abcdef", writes="abcdef")
    script.issue("second")
    assert script.started() == ["first", "second", "matmul"]
    assert matmul.after == [script.tasks["first"], script.tasks["second"]]


def test_a_task_off_the_device_waits_for_the_end() -> None:
    script = Script(link="stream", cpu="ready_first")
    script.submit("fetch", "link", writes="w")
    script.submit("expert", "cpu", reads="w")
    script.issue("fetch")
    assert script.started() == ["fetch"]
    script.finish("fetch")
    assert script.started() == ["expert"]


def test_a_stream_runs_ahead_of_its_progress_by_its_depth() -> None:
    script = Script(gpu="stream")
    for number in range(4):
        script.submit(f"{number}", "gpu")
    script.issue("0")
    script.issue("1")
    assert script.started() == ["0", "1"]
    script.finish("0")
    assert script.started() == ["2"]


def test_an_accelerator_runs_ahead_further_than_its_copies() -> None:
    batch = split_batch([3, 4], 2, 1)
    plan = plan_run(TWO_MEMORIES, weight_layout(SMALL, "float32"), batch, make_policy("resident"))
    kinds: dict[str, LaneKind] = {"accelerator": "stream", "host->gpu": "stream"}
    lanes = make_lanes(plan, kinds)
    assert (lanes["accelerator"].depth, lanes["host->gpu"].depth) == (8, 2)


def test_a_task_whose_end_is_heard_of_early_settles_behind_those_it_waited_for_on_the_device() -> None:
    script = Script(gpu="stream", link="stream", cpu="ready_first")
    script.submit("fetch", "link", writes="w")
    script.submit("matmul", "gpu", reads="w", writes="y")
    script.submit("read", "cpu", reads="y")
    script.issue("fetch")
    script.issue("matmul")
    script.finish("matmul")
    assert script.state("matmul") == "issued"
    script.finish("fetch")
    assert script.started() == ["fetch", "matmul", "read"]


def test_a_failure_on_the_device_spoils_what_was_issued_behind_it() -> None:
    script = Script(gpu="stream", link="stream")
    script.submit("fetch", "link", writes="w")
    script.submit("matmul", "gpu", reads="w")
    script.issue("fetch")
    script.issue("matmul")
    script.fail("fetch")
    script.finish("matmul")
    assert script.state("matmul") == "cancelled"
    script.engine.check_over()


def waiting_on_the_device() -> Script:
    """`late` runs on a stream; `both` waits for it there, and `next` overwrites what both of them use."""
    script = Script(link="stream", gpu="stream", cpu="ready_first", disk="ready_first")
    script.submit("late", "link", writes="x")
    script.issue("late")
    return script


def test_a_task_that_a_failure_cancels_settles_only_after_what_it_waited_for_on_the_device() -> None:
    script = waiting_on_the_device()
    script.submit("input", "cpu", writes="y")
    script.submit("both", "gpu", reads="xy", writes="x")
    script.submit("next", "disk", writes="x")
    script.fail("input")
    assert script.state("both") == "waiting"
    assert script.started() == ["late", "input"]
    script.finish("late")
    assert script.state("both") == "cancelled"
    assert script.started() == ["next"]


def test_a_ready_task_that_is_cancelled_settles_only_after_what_it_waited_for_on_the_device() -> None:
    script = waiting_on_the_device()
    script.submit("busy", "gpu")
    script.submit("both", "gpu", reads="x", writes="x")
    script.submit("next", "disk", writes="x")
    assert script.state("both") == "ready"
    assert script.cancel("both")
    assert script.started() == ["late", "busy"]
    script.finish("late")
    assert script.state("both") == "cancelled"
    assert script.started() == ["next"]


def test_halting_waits_for_the_device_too() -> None:
    script = waiting_on_the_device()
    script.submit("busy", "gpu")
    script.submit("both", "gpu", reads="x", writes="x")
    script.engine.halt(TaskCancelled("stopped"))
    assert script.state("both") == "waiting"
    script.issue("busy")
    script.finish("busy")
    script.finish("late")
    assert script.state("both") == "cancelled"
    script.engine.check_over()

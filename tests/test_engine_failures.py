"""The engine when a task fails, is withdrawn, or everything is halted: what is cancelled, and what goes on."""

from __future__ import annotations

import sys

import pytest

from engine_script import WORK, Script
from moesched.drivers.validation import CheckedEngine
from moesched.errors import TaskCancelled, TaskFailed
from moesched.tasks import Block, Discipline, Kernel, Lane


def test_what_needs_a_failed_result_is_cancelled_and_what_only_follows_goes_on() -> None:
    script = Script(gpu="ready_first", cpu="ready_first", link="ready_first")
    script.submit("fetch", "link", writes="w")
    script.submit("needs it", "gpu", reads="w", writes="y")
    script.submit("needs that", "gpu", reads="y")
    script.submit("overwrites", "cpu", writes="w")
    script.fail("fetch")
    assert script.started() == ["fetch", "overwrites"]
    assert [script.state(name) for name in ("fetch", "needs it", "needs that")] == [
        "failed",
        "cancelled",
        "cancelled",
    ]


def test_a_task_submitted_after_the_failure_of_its_input_is_cancelled_at_once() -> None:
    script = Script(gpu="ready_first", link="ready_first")
    script.submit("fetch", "link", writes="w")
    script.fail("fetch")
    task = script.submit("needs it", "gpu", reads="w")
    assert script.state("needs it") == "cancelled"
    assert isinstance(task.cause, TaskFailed)


def test_a_cancelled_task_settles_only_after_all_before_it_so_that_storage_is_free_when_it_says_so() -> None:
    script = Script(gpu="ready_first", link="ready_first", cpu="ready_first")
    script.submit("fetch", "link", writes="w")
    script.submit("reader", "cpu", reads="x")
    script.submit("writer", "gpu", reads="w", writes="x")
    script.submit("next", "link", writes="x")
    script.fail("fetch")
    assert script.state("writer") == "waiting"
    assert script.started() == ["fetch", "reader"]
    script.finish("reader")
    assert script.state("writer") == "cancelled"
    assert script.started() == ["next"]


def test_an_in_order_lane_goes_on_past_a_task_that_a_failure_elsewhere_cancelled() -> None:
    script = Script(gpu="in_order", link="in_order")
    script.submit("fetch", "link", writes="w")
    script.submit("needs it", "gpu", reads="w")
    script.submit("needs nothing", "gpu")
    script.fail("fetch")
    assert script.started() == ["fetch", "needs nothing"]


def test_overwriting_heals_what_a_failure_spoiled() -> None:
    script = Script(gpu="ready_first", link="ready_first")
    script.submit("fetch", "link", writes="w")
    script.fail("fetch")
    script.submit("again", "link", writes="w")
    script.submit("reader", "gpu", reads="w")
    script.finish("again")
    assert script.started() == ["fetch", "again", "reader"]


def test_a_join_hands_a_failure_on() -> None:
    script = Script(gpu="ready_first", a="ready_first", b="ready_first")
    script.submit("page a", "a", writes="a")
    script.submit("page b", "b", writes="b")
    script.engine.join([script.blocks["a"], script.blocks["b"]], [script.blocks.setdefault("v", Block("v"))])
    script.submit("kernel", "gpu", reads="v")
    script.fail("page a")
    assert script.state("kernel") == "waiting"
    script.finish("page b")
    assert script.state("kernel") == "cancelled"


def test_a_halting_engine_raises_the_failure_at_the_next_submission() -> None:
    script = Script(gpu="ready_first", halt_on_failure=True)
    script.submit("kernel", "gpu")
    script.fail("kernel")
    with pytest.raises(TaskFailed, match="kernel failed on lane gpu after waiting for nothing"):
        script.submit("next", "gpu")


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


def test_a_task_that_waits_for_its_lane_can_be_cancelled_and_never_runs() -> None:
    script = Script(link="ready_first")
    script.submit("running", "link")
    script.submit("unwanted", "link")
    script.submit("wanted", "link")
    assert script.cancel("unwanted")
    assert script.state("unwanted") == "cancelled"
    assert script.run() == ["running", "wanted"]


def test_a_task_that_waits_for_data_is_cancelled_once_the_data_is_there() -> None:
    script = Script(gpu="in_order", link="ready_first")
    script.submit("fetch", "link", writes="w")
    script.submit("unwanted", "gpu", reads="w")
    script.submit("wanted", "gpu")
    assert script.cancel("unwanted")
    assert script.state("unwanted") == "waiting"
    assert script.run() == ["fetch", "wanted"]


def test_what_reads_the_result_of_a_cancelled_task_is_cancelled_too() -> None:
    script = Script(gpu="ready_first", link="ready_first")
    script.submit("running", "link")
    script.submit("unwanted", "link", writes="w")
    task = script.submit("needs it", "gpu", reads="w")
    script.cancel("unwanted")
    assert script.state("needs it") == "cancelled"
    assert isinstance(task.cause, TaskCancelled)


@pytest.mark.parametrize("discipline", ["in_order", "ready_first"])
def test_a_task_that_runs_or_has_ended_cannot_be_cancelled(discipline: Discipline) -> None:
    script = Script(gpu=discipline)
    script.submit("task", "gpu")
    assert not script.cancel("task")
    script.finish("task")
    assert not script.cancel("task")
    assert script.state("task") == "done"


def test_a_task_is_cancelled_once() -> None:
    script = Script(gpu="ready_first")
    script.submit("running", "gpu")
    script.submit("task", "gpu")
    assert script.cancel("task")
    assert not script.cancel("task")


def test_halting_cancels_what_has_not_started_and_lets_the_rest_end() -> None:
    script = Script(gpu="in_order", link="ready_first")
    script.submit("fetch", "link", writes="w")
    script.submit("kernel", "gpu", reads="w")
    script.submit("prefetch", "link")
    script.engine.halt(TaskCancelled("stopped"))
    assert script.state("prefetch") == "cancelled"
    script.finish("fetch")
    assert script.state("kernel") == "cancelled"
    assert script.started() == ["fetch"]
    script.engine.check_over()


def test_halting_a_long_chain_needs_no_recursion() -> None:
    script = Script(gpu="ready_first")
    for number in range(3000):
        script.submit(f"write {number}", "gpu", writes="x")
    script.engine.halt(TaskCancelled("stopped"))
    script.finish("write 0")
    assert script.state("write 2999") == "cancelled"
    script.engine.check_over()


def test_what_is_submitted_to_a_halted_engine_is_cancelled() -> None:
    script = Script(gpu="in_order")
    script.engine.halt(TaskCancelled("stopped"))
    script.submit("late", "gpu")
    assert script.state("late") == "cancelled"
    script.engine.check_over()


def test_a_failed_chain_of_thousands_settles_without_recursion() -> None:
    script = Script(gpu="ready_first")
    for number in range(3000):
        script.submit(f"change {number}", "gpu", reads="x", writes="x")
    script.fail("change 0")
    assert script.state("change 2999") == "cancelled"
    script.engine.check_over()

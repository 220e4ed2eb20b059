"""The engine: which tasks start when, told as what is submitted, what ends, and what starts."""

from __future__ import annotations

import pytest

from engine_script import WORK, Script
from moesched.errors import TaskCancelled, TaskFailed
from moesched.tasks import DEMAND, IDLE, PREFETCH, Block, Discipline, Kernel, Lane
from moesched.validation import BrokenRule, CheckedEngine, CheckedSharedEngine, new_engine, new_shared_engine

# -- edges come from the data ----------------------------------------------------------------------


def test_a_reader_starts_when_the_writer_is_done() -> None:
    script = Script(gpu="ready_first", link="ready_first")
    script.submit("fetch", "link", writes="w")
    script.submit("matmul", "gpu", reads="w")
    assert script.started() == ["fetch"]
    script.finish("fetch")
    assert script.started() == ["matmul"]


def test_readers_of_the_same_value_run_beside_each_other() -> None:
    script = Script(gpu="ready_first", cpu="ready_first", link="ready_first")
    script.submit("fetch", "link", writes="w")
    script.submit("left", "gpu", reads="w")
    script.submit("right", "cpu", reads="w")
    script.finish("fetch")
    assert script.started() == ["fetch", "left", "right"]


def test_a_writer_waits_for_all_readers_of_what_it_overwrites() -> None:
    script = Script(gpu="ready_first", cpu="ready_first", link="ready_first")
    script.submit("left", "gpu", reads="w")
    script.submit("right", "cpu", reads="w")
    script.submit("fetch", "link", writes="w")
    script.finish("left")
    assert script.started() == ["left", "right"]
    script.finish("right")
    assert script.started() == ["fetch"]


def test_a_writer_waits_for_the_writer_before_it() -> None:
    script = Script(gpu="ready_first", link="ready_first")
    script.submit("first", "gpu", writes="w")
    script.submit("second", "link", writes="w")
    assert script.started() == ["first"]
    script.finish("first")
    assert script.started() == ["second"]


def test_a_reader_waits_for_the_last_writer_before_it_and_for_no_later_one() -> None:
    script = Script(gpu="ready_first", link="ready_first")
    script.submit("old", "link", writes="w")
    script.submit("reader", "gpu", reads="w")
    script.submit("new", "link", writes="w")
    script.finish("old")
    assert script.started() == ["old", "reader"]
    script.finish("reader")
    assert script.started() == ["new"]


def test_a_change_in_place_is_a_read_and_a_write() -> None:
    script = Script(a="ready_first", b="ready_first", c="ready_first")
    script.submit("make", "a", writes="x")
    script.submit("change", "b", reads="x", writes="x")
    script.submit("use", "c", reads="x")
    assert script.run() == ["make", "change", "use"]


def test_a_task_may_read_a_block_twice_and_write_it_twice() -> None:
    script = Script(gpu="ready_first", cpu="ready_first")
    script.submit("make", "gpu", writes="xx")
    script.submit("change", "cpu", reads="xx", writes="xx")
    script.submit("again", "gpu", reads="x", writes="x")
    assert script.run() == ["make", "change", "again"]


def test_order_by_hand_holds_where_the_data_says_nothing() -> None:
    script = Script(gpu="ready_first", cpu="ready_first")
    script.submit("first", "gpu")
    script.submit("second", "cpu", after=["first"])
    assert script.started() == ["first"]
    script.finish("first")
    assert script.started() == ["second"]


def test_order_by_hand_behind_a_task_that_has_ended_is_met() -> None:
    script = Script(gpu="ready_first", cpu="ready_first")
    script.submit("first", "gpu")
    script.finish("first")
    script.submit("second", "cpu", after=["first"])
    assert script.started() == ["first", "second"]


def test_a_join_stands_for_many_and_takes_no_lane() -> None:
    script = Script(gpu="ready_first", a="ready_first", b="ready_first")
    script.submit("page a", "a", writes="a")
    script.submit("page b", "b", writes="b")
    script.engine.join([script.blocks["a"], script.blocks["b"]], [script.blocks.setdefault("v", Block("v"))])
    script.submit("kernel", "gpu", reads="v")
    script.finish("page b")
    assert script.started() == ["page a", "page b"]
    script.finish("page a")
    assert script.started() == ["kernel"]


def test_edges_of_ended_tasks_are_still_told_for_the_trace() -> None:
    script = Script(gpu="ready_first", link="ready_first")
    fetch = script.submit("fetch", "link", writes="w")
    script.finish("fetch")
    assert script.submit("matmul", "gpu", reads="w").deps == [fetch.id]


# -- lanes -----------------------------------------------------------------------------------------


def test_a_lane_runs_one_task_at_a_time() -> None:
    script = Script(gpu="ready_first")
    script.submit("first", "gpu")
    script.submit("second", "gpu")
    assert script.started() == ["first"]
    script.finish("first")
    assert script.started() == ["second"]


def test_an_in_order_lane_waits_for_its_first_task_though_a_later_one_is_ready() -> None:
    script = Script(gpu="in_order", link="ready_first")
    script.submit("fetch", "link", writes="w")
    script.submit("needs it", "gpu", reads="w")
    script.submit("needs nothing", "gpu")
    assert script.started() == ["fetch"]
    script.finish("fetch")
    script.finish("needs it")
    assert script.started() == ["needs it", "needs nothing"]


def test_a_ready_first_lane_goes_on_with_what_is_ready() -> None:
    script = Script(gpu="ready_first", link="ready_first")
    script.submit("fetch", "link", writes="w")
    script.submit("needs it", "gpu", reads="w")
    script.submit("needs nothing", "gpu")
    assert script.started() == ["fetch", "needs nothing"]


def test_a_ready_first_lane_takes_the_earliest_of_a_class() -> None:
    script = Script(gpu="ready_first", link="ready_first")
    script.submit("running", "gpu")
    script.submit("fetch", "link", writes="w")
    script.submit("earlier", "gpu", reads="w")
    script.submit("later", "gpu")
    script.finish("fetch")
    script.finish("running")
    assert script.started() == ["running", "fetch", "earlier"]


def test_a_demand_goes_before_a_prefetch_and_a_prefetch_before_an_idle_one() -> None:
    script = Script(link="ready_first")
    script.submit("running", "link")
    script.submit("idle", "link", urgency=IDLE)
    script.submit("prefetch", "link", urgency=PREFETCH)
    script.submit("demand", "link", urgency=DEMAND)
    assert script.run() == ["running", "demand", "prefetch", "idle"]


def test_lifting_a_transfer_that_waits_for_its_lane_moves_it_ahead() -> None:
    script = Script(link="ready_first")
    script.submit("running", "link")
    script.submit("one", "link", urgency=IDLE)
    script.submit("other", "link", urgency=IDLE)
    script.engine.lift(script.tasks["other"], DEMAND)
    assert script.run() == ["running", "other", "one"]


def test_lifting_a_transfer_that_waits_for_data_counts_once_it_is_ready() -> None:
    script = Script(link="ready_first", cpu="ready_first")
    script.submit("running", "link")
    script.submit("data", "cpu", writes="x")
    script.submit("one", "link", urgency=PREFETCH)
    script.submit("other", "link", reads="x", urgency=IDLE)
    script.engine.lift(script.tasks["other"], DEMAND)
    script.finish("data")
    script.finish("running")
    assert script.started() == ["running", "data", "other"]


def test_lifting_to_a_less_urgent_class_or_a_running_task_does_nothing() -> None:
    script = Script(link="ready_first")
    script.submit("running", "link", urgency=PREFETCH)
    script.submit("waiting", "link", urgency=PREFETCH)
    keys = [task.key for task in script.tasks.values()]
    script.engine.lift(script.tasks["running"], DEMAND)
    script.engine.lift(script.tasks["waiting"], IDLE)
    assert [task.key for task in script.tasks.values()] == keys


# -- failure ---------------------------------------------------------------------------------------


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

    def verb() -> Kernel:
        return engine.submit(Kernel(lane, WORK, "kernel", 3, 1))

    task = verb()
    engine.fail(task, ValueError("no memory"))
    assert isinstance(engine.failure, TaskFailed)
    assert "kernel L3 mb1 failed on lane gpu" in str(engine.failure)
    assert "no memory" in str(engine.failure)
    assert task.line.startswith(__file__)


# -- cancellation ----------------------------------------------------------------------------------


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


# -- streams ---------------------------------------------------------------------------------------


def test_a_task_is_issued_behind_one_on_another_stream_that_has_not_ended() -> None:
    script = Script(gpu="stream", link="stream")
    script.submit("fetch", "link", writes="w")
    matmul = script.submit("matmul", "gpu", reads="w")
    assert script.started() == ["fetch"]
    script.issue("fetch")
    assert script.started() == ["matmul"]
    assert matmul.after == [script.tasks["fetch"]]


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


# -- the checking mode -----------------------------------------------------------------------------


def test_every_run_of_a_test_is_checked() -> None:
    assert isinstance(new_engine([]), CheckedEngine)
    assert isinstance(new_shared_engine([]), CheckedSharedEngine)


def test_the_checking_mode_notices_a_task_that_ends_without_having_run() -> None:
    script = Script(gpu="ready_first")
    script.submit("first", "gpu")
    script.submit("second", "gpu")
    with pytest.raises(BrokenRule, match="second"):
        script.finish("second")


def test_the_checking_mode_notices_what_never_ended() -> None:
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

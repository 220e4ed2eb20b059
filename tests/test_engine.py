"""The engine: which tasks start when, told as what is submitted, what ends, and what starts."""

from __future__ import annotations

from engine_script import Script
from moesched.tasks import DEMAND, IDLE, PREFETCH, Block


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


def test_lifting_a_transfer_that_waits_for_its_lane_moves_it_ahead() -> None:
    script = Script(link="ready_first")
    script.submit("running", "link")
    script.submit("one", "link", urgency=IDLE)
    script.submit("other", "link", urgency=IDLE)
    script.engine.promote(script.tasks["other"], DEMAND)
    assert script.run() == ["running", "other", "one"]


def test_lifting_a_transfer_that_waits_for_data_counts_once_it_is_ready() -> None:
    script = Script(link="ready_first", cpu="ready_first")
    script.submit("running", "link")
    script.submit("data", "cpu", writes="x")
    script.submit("one", "link", urgency=PREFETCH)
    script.submit("other", "link", reads="x", urgency=IDLE)
    script.engine.promote(script.tasks["other"], DEMAND)
    script.finish("data")
    script.finish("running")
    assert script.started() == ["running", "data", "other"]


def test_lifting_to_a_less_urgent_class_or_a_running_task_does_nothing() -> None:
    script = Script(link="ready_first")
    script.submit("running", "link", urgency=PREFETCH)
    script.submit("waiting", "link", urgency=PREFETCH)
    keys = [task.key for task in script.tasks.values()]
    script.engine.promote(script.tasks["running"], DEMAND)
    script.engine.promote(script.tasks["waiting"], IDLE)
    assert [task.key for task in script.tasks.values()] == keys

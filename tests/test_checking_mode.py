"""The checking mode is on in every test, and notices an engine that breaks its rules."""

from __future__ import annotations

import pytest

from engine_script import Script
from moesched.drivers.validation import (
    BrokenRule,
    CheckedEngine,
    CheckedSharedEngine,
    new_engine,
    new_shared_engine,
)
from moesched.tasks import DEMAND, IDLE


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

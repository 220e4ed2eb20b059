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

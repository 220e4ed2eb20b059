"""Links that were idle: which transfers then take longer, and by how much."""

from __future__ import annotations

from itertools import pairwise
from time import perf_counter

import msgspec
import pytest

from moesched.calibration.timing import measure_after_pause
from moesched.machines import CostPoint, Machine, load_machine
from moesched.machines.roofline import Roofline
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.tasks import Task
from runs import Ended

MS = 1_000_000
MACHINE = load_machine("cpu-nvme")
SLOW_TO_RESUME = msgspec.structs.replace(
    MACHINE, cost_table=[CostPoint(operation="resume disk->host", size=0, seconds=0.005)]
)


def transfers(machine: Machine, policy: str) -> list[Task]:
    """The transfers from the disk of one request under a policy, in order, if lanes do not slow each other down."""
    layout, made, ran = weight_layout(SHAPES["mixtral-0.8b"]), make_policy(policy), Ended()
    plan = plan_run(machine, layout, split_batch([4], 4, 1), made, {"host": 1_500_000_000})
    simulate(plan, made, cost=Roofline(MACHINE, "bfloat16"), sharing=False, observers=[ran])
    return [task for task in ran.tasks if task.lane.name == "disk->host"]


@pytest.mark.parametrize("policy", ["lru_offload", "expert_streaming", "layer_streaming"])
def test_a_transfer_takes_longer_if_its_link_was_idle_for_a_millisecond_and_only_then(policy: str) -> None:
    usual, slow = transfers(MACHINE, policy), transfers(SLOW_TO_RESUME, policy)
    assert list(map(str, usual)) == list(map(str, slow))
    longer = [
        after.end - after.start - (before.end - before.start)
        for before, after in zip(usual, slow, strict=True)
    ]
    idle = [True, *(after.start - before.end >= MS for before, after in pairwise(slow))]
    assert longer == [5 * MS if each else 0 for each in idle]
    assert {True, False} == set(idle)


def test_the_time_after_a_pause_is_the_difference_to_a_call_right_after_another() -> None:
    paused = False

    def call() -> None:
        nonlocal paused
        end = perf_counter() + (0.004 if paused else 0.001)
        paused = False
        while perf_counter() < end:
            pass

    def pause() -> None:
        nonlocal paused
        paused = True

    assert 0.002 < measure_after_pause(call, pause, seconds=0.0005, repeats=5) < 0.004

"""A replay on lanes that issue in order, where nothing is chosen: the same as the run, to the nanosecond."""

from __future__ import annotations

import msgspec
import pytest

from moesched.machines import load_machine
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.models.tensor_parallel import cut_config
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.outcome import Report
from moesched.runs.simulation import simulate
from moesched.seams import Policy
from moesched.steps.plan import Plan
from moesched.trace import Recorder, Slice

POLICIES = ("resident", "layer_streaming", "cgopipe", "flexgen", "flexgen_cpu", "fastdecode")
BUDGETS = {"gpu": 700_000_000}


class InOrder:
    """Has the lanes issue a policy's tasks in order."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.prefill, self.decode = policy.prefill, policy.decode

    def plan(self, plan: Plan) -> None:
        plan.discipline = "in_order"
        self._policy.plan(plan)


def simulated(name: str, ranks: int, *, replay: bool) -> tuple[Report, list[Slice]]:
    """A report without the real time, and the slices of a run of one rank, with its fast memory too small."""
    policy, recorder = InOrder(make_policy(name)), Recorder()
    config = cut_config(SHAPES["mixtral-0.8b"], ranks) if ranks > 1 else SHAPES["mixtral-0.8b"]
    machine = load_machine("t4" if ranks == 1 else f"t4x{ranks}")
    budgets = None if name == "resident" else BUDGETS
    plan = Plan(machine, weight_layout(config), split_batch([8, 5, 9, 7], 9, 2), budgets)
    policy.plan(plan)
    report = simulate(plan, policy, sharing=False, replay=replay, recorder=recorder)
    slices = sorted(recorder.recording().slices, key=lambda each: each.id)
    assert report.simulated_steps is not None
    assert (report.simulated_steps < 9) is replay
    return msgspec.structs.replace(report, wall_seconds=0.0, simulated_steps=None), slices


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", POLICIES)
def test_a_replay_in_order_has_the_times_of_the_run(name: str, ranks: int) -> None:
    built, replayed = (simulated(name, ranks, replay=replay) for replay in (False, True))
    assert times(replayed[1]) == times(built[1])
    assert replayed[0] == built[0]


def times(slices: list[Slice]) -> list[tuple[int, str, str, int, int]]:
    return [(each.id, each.task.label, each.lane.name, each.start, each.end) for each in slices]

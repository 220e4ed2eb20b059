"""A layer takes the time that twiddler_makespan expects, with lanes that share memories."""

from __future__ import annotations

from statistics import median
from typing import Any

import msgspec
import pytest

from moesched.machines import load_machine
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.routing.choices import BatchRouting
from moesched.routing.generated import GeneratedChoices
from moesched.routing.popularity import LikeMixtral
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from runs import Ended

MIXTRAL = SHAPES["mixtral-8x7b"]
CASES = {"a prompt of 64": (64, 6, 1), "a prompt of 300": (300, 2, 1), "8 beams": (16, 6, 8)}


@pytest.mark.parametrize("case", CASES)
def test_layers_take_what_was_expected_of_them(case: str) -> None:
    prompt, new_tokens, beams = CASES[case]
    batch = msgspec.structs.replace(split_batch([prompt], new_tokens, 1), beams=beams)
    policy: Any = make_policy("twiddler_makespan", {"experts": 56})
    plan = plan_run(load_machine("rtx6000"), weight_layout(MIXTRAL, "bfloat16"), batch, policy)
    ended = Ended()
    routing = BatchRouting(GeneratedChoices(LikeMixtral(), MIXTRAL), batch)
    simulate(plan, policy, routing=routing, sharing=True, observers=[ended])
    ends: dict[tuple[int, int], int] = {}
    steps = [task for task in ended.tasks if task.step >= 0]
    for task in steps:
        if task.verb in ("run_expert", "load_routed"):
            ends[task.step, task.layer] = max(task.end, ends.get((task.step, task.layer), 0))
    errors = []
    for task in steps:
        if task.verb == "route":
            expected = policy.decisions.divide({0: task.value}, policy.stays[task.layer]).seconds
            if expected:
                errors.append(abs(1e9 * expected / (ends[task.step, task.layer] - task.end) - 1))
    assert len(errors) >= 32
    assert median(errors) < 0.02

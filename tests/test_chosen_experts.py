"""The cost of a layer that is one task, in simulations which know the experts that tokens choose."""

from __future__ import annotations

import pytest

from moesched.errors import BadInput
from moesched.models.operations import Operations
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.runs.simulation import simulate
from moesched.tasks import Task
from runs import make_plan, predicted
from scripted_routing import Scripted

LAYERS = SHAPES["mixtral-0.8b"].layers
USED = [[2 + (step + layer) % 7 for layer in range(LAYERS)] for step in range(2)]
"""The number of experts that a step's tokens choose, by step and layer."""


class Layers:
    """Observer that notes the experts of each task `post_attention`, by step and layer."""

    def __init__(self) -> None:
        self.experts: dict[tuple[int, int], float] = {}

    def ended(self, task: Task) -> None:
        if task.verb == "post_attention":
            counts = [part.times for part in task.work.parts if part.operation.endswith("experts")]
            self.experts[task.generated, task.layer] = sum(counts)


def experts_of(used: list[list[int]] | None) -> list[list[float]]:
    """The experts that the tasks of two steps are priced with, by step and layer."""
    policy, layers = make_policy("resident"), Layers()
    plan = make_plan(policy, requests=2, new_tokens=2)
    choices = None if used is None else Scripted([[range(count) for count in step] for step in used])
    simulate(plan, policy, routing=choices, observers=[layers])
    return [[layers.experts[step, layer] for layer in range(LAYERS)] for step in range(2)]


def test_a_layer_costs_as_much_as_the_experts_that_its_tokens_choose() -> None:
    assert experts_of(USED) == USED


def test_a_layer_costs_the_mean_where_tokens_choose_uniformly() -> None:
    prompts, token = (8 * (1 - 0.75**tokens) for tokens in (16, 2))
    assert experts_of(None) == [pytest.approx([each] * LAYERS) for each in (prompts, token)]


def test_each_expert_costs_what_its_own_rows_cost() -> None:
    operations = Operations(SHAPES["mixtral-0.8b"], "bfloat16")
    of_experts = [part for part in operations.experts(4, (1, 1, 1, 5)).parts if part.times]
    assert [(part.rows, part.times) for part in of_experts] == [(1, 3), (5, 1)]
    spread = operations.experts(4, (2, 2, 2, 2))
    assert [(part.rows, part.times) for part in spread.parts] == [(2, 4)]
    assert operations.experts(4, (1, 1, 1, 5))._replace(parts=()) == spread._replace(parts=())


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_that_share_their_experts_take_less_time(ranks: int) -> None:
    def decode(routing: str) -> float:
        report = predicted(
            "resident",
            machine="t4x2",
            tensor_parallel=ranks,
            gen=3,
            batch_size=4,
            routing=routing,
            routing_settings={"exponent": 4} if routing == "zipf" else None,
        )
        return report.decode_tokens_per_second or 0

    assert decode("zipf") > 1.2 * decode("uniform")


def test_a_replay_is_refused_where_durations_depend_on_the_routing() -> None:
    policy = make_policy("resident")
    with pytest.raises(BadInput, match="depend on the experts that tokens choose: give replay=False"):
        simulate(make_plan(policy), policy, routing=Scripted([]), sharing=False, replay=True)

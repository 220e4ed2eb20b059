"""The routing of requests that join and leave: each token has the experts of its request and position."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest

import moesched
from moesched.machines import load_machine
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from moesched.requests.rows import Row, Rows
from moesched.routing.choices import Integers
from moesched.routing.served import ServedRouting
from moesched.runs.planning import plan_run
from moesched.runs.served_parts import ServingSetup
from moesched.runs.served_runs import simulate_serving
from moesched.serving.arrivals import ListedArrivals
from moesched.serving.capacity import Capacity
from moesched.testing.served_checks import random_requests
from small_models import SMALL


class Spread:
    """Choices that tell requests and positions apart."""

    experts = 100

    def of_tokens(self, layer: int, requests_T: Integers, positions_T: Integers) -> Integers:
        """One expert of each token."""
        experts: Integers = (10 * requests_T + positions_T)[:, None]
        return experts


def test_a_step_has_the_tokens_of_its_rows_while_the_next_one_is_submitted() -> None:
    routing = ServedRouting(Spread())
    routing.begin(0, {0: Rows("prefill", (Row(1, 0, 3), Row(2, 0, 2)))})
    routing.begin(1, {0: Rows("decode", (Row(1, 3, 1, 1),)), 1: Rows("decode", (Row(3, 7, 1, 1),))})
    assert routing.choose(0, 0, 0, 5) == {10: 1, 11: 1, 12: 1, 20: 1, 21: 1}
    assert routing.choose(1, 0, 0, 1) == {13: 1}
    assert routing.choose(1, 0, 1, 1) == {37: 1}


class Noted(Spread):
    """Choices that note the tokens that they were asked for, by layer."""

    experts = SMALL.routed.experts

    def __init__(self) -> None:
        self.asked: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)

    def of_tokens(self, layer: int, requests_T: Integers, positions_T: Integers) -> Integers:
        """Two experts of each token."""
        self.asked[layer] += zip(requests_T.tolist(), positions_T.tolist(), strict=True)
        first = (requests_T + positions_T) % self.experts
        experts: Integers = np.sort(np.stack([first, (first + 1) % self.experts], axis=1))
        return experts


@pytest.mark.parametrize("policy", ["expert_cache", "lru_offload", "resident"])
def test_every_token_of_every_request_is_routed_once_in_each_layer(policy: str) -> None:
    chosen, capacity, choices = make_policy(policy), Capacity(2, 3, 6 * 16, 24, 32), Noted()
    plan = plan_run(load_machine("t4"), weight_layout(SMALL), capacity.fullest(), chosen)
    requests = random_requests(1, 20, 8, 6)
    setup = ServingSetup(plan, chosen, capacity, ListedArrivals(requests))
    simulate_serving(setup, routing=ServedRouting(choices))
    routed = [(each.number, place) for each in requests for place in range(each.prompt + each.new_tokens - 1)]
    for layer in plan.layers:
        assert sorted(choices.asked[layer]) == routed


@pytest.mark.parametrize(("policy", "budgets"), [("expert_cache", {"gpu": "900MB"}), ("resident", None)])
def test_uneven_experts_are_faster_to_serve(policy: str, budgets: dict[str, str] | None) -> None:
    def rate(routing: str) -> float:
        report = moesched.simulate_arrivals(
            "mixtral-0.8b",
            machine="t4",
            policy=policy,
            workload="uniform",
            arrivals="poisson:1000",
            requests=4,
            gen=4,
            batch_size=2,
            budgets=budgets,
            routing=routing,
            routing_settings={"exponent": 3} if routing == "zipf" else None,
        )
        return report.tokens_per_second

    assert rate("zipf") > rate("uniform")

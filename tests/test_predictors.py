"""Predictors of routing: their forecasts, the errors of those that err, and policies that prefetch by them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from meddling import CASE, CLOCKS, Everything, refused
from moesched.dispatch import (
    ExpertLatencies,
    FollowingExperts,
    Forecast,
    Forecasts,
    LaterRouters,
    LayerByLayer,
    Predictor,
    keep_dense,
    place_kv_that_fits,
    users_of,
)
from moesched.dispatch.expert_placement import Routed
from moesched.errors import BadInput
from moesched.machines import load_machine
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.requests.batch import split_batch
from moesched.routing import SeededRouting
from moesched.routing.profile import write_profile
from moesched.routing.trace import RoutingTrace, write_routing_trace
from moesched.runs.policy_errors import explained
from moesched.runs.simulation import simulate
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.testing import run_on_symbols
from moesched.testing.policy_checks import Clock
from routing_traces import routed

PLAN = CASE.plan(Everything())
EXPERTS = 4
LAYERS = 3


def tokens_in_turn(layer: int, token: int) -> list[int]:
    """Two experts of a token: the one after them in each following layer."""
    return sorted({(token + layer) % EXPERTS, (token + layer + 1) % EXPERTS})


def forecast(predictor: Predictor, layer: int, micro_batches: Sequence[int] = (0,)) -> Any:
    """The forecast of a predictor that uses no step."""
    step: Any = None
    asking = predictor.forecast(step, layer, micro_batches)
    with pytest.raises(StopIteration) as ended:
        asking.__await__().send(None)
    return ended.value.value


def taught(ahead: int = 1) -> FollowingExperts:
    """A predictor that has seen each token once in each layer."""
    predictor = FollowingExperts(PLAN, ahead)
    for token in range(EXPERTS):
        for layer in range(LAYERS):
            predictor.routed(layer, {0: dict.fromkeys(tokens_in_turn(layer, token), 1)})
    return predictor


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """The file of a trace in which experts follow each other in turn."""
    chosen = np.array([[tokens_in_turn(i, t) for i in range(LAYERS)] for t in range(8)], np.uint8)
    path = tmp_path / "trace.npz"
    write_routing_trace(RoutingTrace("small", EXPERTS, chosen, np.array([8]), np.array([7])), path)
    return str(path)


def test_experts_that_followed_most_often_are_expected_as_many_as_were_chosen_before() -> None:
    predictor = taught()
    predictor.routed(0, {0: {1: 1, 2: 1}})
    assert forecast(predictor, 1) == {0: {2: 0.75, 3: 0.75}}


def test_tokens_count() -> None:
    predictor = taught()
    predictor.routed(0, {0: {1: 2, 2: 2}, 1: {0: 4, 3: 4}})
    assert forecast(predictor, 1, (0, 1)) == {0: {2: 1.5, 3: 1.5}, 1: {0: 3.0, 1: 3.0}}


def test_a_trace_teaches_the_same_as_a_run(trace: str) -> None:
    predictor = FollowingExperts(PLAN, trace=trace)
    predictor.routed(0, {0: {1: 1, 2: 1}})
    assert forecast(predictor, 1) == {0: {2: 0.75, 3: 0.75}}


def test_a_trace_counts_as_much_as_the_same_tokens_in_a_run(trace: str) -> None:
    read, ran = FollowingExperts(PLAN, trace=trace), FollowingExperts(PLAN)
    for token in range(8):
        for layer in range(LAYERS):
            ran.routed(layer, {0: dict.fromkeys(tokens_in_turn(layer, token), 1)})
    for predictor in (read, ran):
        for _ in range(3):  # by others than in the trace
            predictor.routed(0, {0: {1: 1, 2: 1}})
            predictor.routed(1, {0: {0: 1, 1: 1}})
        predictor.routed(0, {0: {1: 1, 2: 1}})
    assert forecast(read, 1) == forecast(ran, 1)


def test_nothing_is_expected_while_nothing_was_counted_or_the_layer_is_too_far() -> None:
    fresh = FollowingExperts(PLAN)
    assert forecast(fresh, 1) == {0: {}}
    fresh.routed(0, {0: {1: 1}})
    assert forecast(fresh, 1) == {0: {}}
    near, far = taught(), taught(ahead=2)
    for predictor in (near, far):
        predictor.routed(0, {0: {1: 1, 2: 1}})
    assert forecast(near, 2) == {0: {}}
    assert forecast(far, 2) == {0: {3: 0.75, 0: 0.75}}


def test_the_last_layer_of_a_step_is_not_followed_by_the_next_steps_first() -> None:
    predictor = FollowingExperts(PLAN)
    predictor.routed(2, {0: {3: 1}})
    predictor.routed(0, {0: {1: 1}})
    assert forecast(predictor, 1) == {0: {}}


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: FollowingExperts(PLAN, ahead=0), "ahead is 0: give 1 or more"),
        (lambda: FollowingExperts(PLAN, trace="no.npz"), "no.npz"),
    ],
)
def test_a_table_that_cannot_be_is_refused(make: Callable[[], object], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        make()


def test_a_profile_has_no_tokens_that_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    write_profile(routed([8], layers=LAYERS, experts=EXPERTS, top_k=2).profile(), path)
    with pytest.raises(BadInput, match="is a routing profile, which has counts and no tokens"):
        FollowingExperts(PLAN, trace=str(path))


class Prefetching(LayerByLayer):
    """Keeps dense weights; experts that are expected one layer ahead are fetched while the layer computes."""

    def __init__(self, make: Callable[[Plan], Any] = FollowingExperts) -> None:
        self.make = make
        self.asked: list[dict[int, float]] = []

    def plan(self, plan: Plan) -> None:
        place_kv_that_fits(plan, experts=8)
        keep_dense(plan)
        self.forecasts = Forecasts(plan, self.make(plan))
        experts = [page for page in plan.layout.pages if page.expert >= 0]
        self.pool = plan.pool("accelerator", "experts", 8 * len(plan.layout.expert(0, 0)), experts)

    async def route_and_run(self, step: Step, i: int, micro_batches: Sequence[int]) -> None:
        routed = {j: await step.route(i, j) for j in micro_batches}
        self.forecasts.routed(i, routed)
        expected = {}
        if i + 1 in step.layers:
            expected = await self.forecasts.of(step, i + 1, micro_batches)
            self.asked.append(expected)
        self.run_experts(step, i, routed)
        for expert in list(expected)[:2]:
            self._fetch(step, i + 1, expert)

    def run_experts(self, step: Step, i: int, routed: Routed) -> None:
        for expert, users in users_of(routed).items():
            self._fetch(step, i, expert)
            self.run_expert(step, i, expert, users)

    def _fetch(self, step: Step, i: int, expert: int) -> None:
        missing = [page for page in step.expert_pages(i, expert) if page not in self.pool]
        if missing:
            step.fetch(missing, self.pool)


@pytest.mark.parametrize("make", [FollowingExperts, lambda plan: LaterRouters()])
@pytest.mark.parametrize("clock", CLOCKS)
def test_prefetching_by_a_predictor_changes_no_token(make: Callable[[Plan], Any], clock: Clock) -> None:
    policy = Prefetching(make)
    ended = run_on_symbols(policy, CASE.plan(policy), clock)
    assert ended.tokens == ended.expected
    assert any(policy.asked)


def test_the_later_routers_forecast_what_a_preview_says() -> None:
    class Compares(Prefetching):
        async def route_and_run(self, step: Step, i: int, micro_batches: Sequence[int]) -> None:
            routed = {j: await step.route(i, j) for j in micro_batches}
            if i + 1 in step.layers:
                previews = [await step.preview_route(i + 1, j) for j in micro_batches]
                both = await self.forecasts.of(step, i + 1, micro_batches)
                assert both == {e: sum(each.get(e, 0) for each in previews) for e in both}
                assert list(both.values()) == sorted(both.values(), reverse=True)
                self.asked.append(both)
            self.run_experts(step, i, routed)

    policy = Compares(lambda plan: LaterRouters())
    run_on_symbols(policy, CASE.plan(policy))
    assert len(policy.asked) > 4


class Answers:
    """A predictor that answers what a test says."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def routed(self, layer: int, routed: Routed) -> None: ...

    async def forecast(self, step: Step, layer: int, micro_batches: Sequence[int]) -> Any:
        return self.answer


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            {0: {99: 1.0}},
            "predictor Answers forecasts E99 of mb0 in L1: return {micro-batch: {expert: tokens}} with",
        ),
        ({7: {1: 1.0}}, "forecasts E1 of mb7 in L1"),
        ({0: [1, 2]}, "forecasts {0: [1, 2]} in L1"),
        (None, "forecasts None in L1"),
    ],
)
def test_an_answer_that_names_what_is_not_there_is_refused(answer: Any, told: str) -> None:
    assert told in str(refused(Prefetching(lambda plan: Answers(answer))))


def test_a_predictor_that_raises_is_told_at_its_own_line() -> None:
    class Raises(Answers):
        async def forecast(self, step: Step, layer: int, micro_batches: Sequence[int]) -> Any:
            return self.answer[layer]

    policy = Prefetching(lambda plan: Raises({}))
    with pytest.raises(KeyError) as caught:
        run_on_symbols(policy, CASE.plan(policy))
    first, *frames, last = explained(caught.value)
    assert first.startswith(f"{__file__}:")
    assert first.endswith(": KeyError: 1")
    assert "return self.answer[layer]" in last
    assert len(frames) <= 3


@pytest.mark.parametrize("wrong", [type("Silent", (), {}), 3])
def test_anything_else_is_no_predictor(wrong: Any) -> None:
    assert "is no predictor: give a class or an object" in str(refused(Prefetching(lambda plan: wrong)))


@pytest.mark.parametrize("kind", [FollowingExperts, LaterRouters])
def test_a_predictor_may_be_given_by_its_class(kind: Any) -> None:
    by_class, by_object = (
        Prefetching(lambda plan: kind),
        Prefetching(lambda plan: FollowingExperts(plan) if kind is FollowingExperts else kind()),
    )
    for policy in (by_class, by_object):
        run_on_symbols(policy, CASE.plan(policy))
    assert by_class.asked == by_object.asked


def test_latencies_of_pages_are_those_of_their_transfer() -> None:
    layout = weight_layout(SHAPES["mixtral-8x7b"])
    plan = Plan(load_machine("t4"), layout, split_batch([8], 2, 1))
    latencies, pages = ExpertLatencies(plan), layout.expert(0, 0)
    assert latencies.moving(pages) == latencies.transfer
    assert latencies.moving(pages, "host") == latencies.transfer
    assert latencies.moving(pages, "accelerator", "host") > 0
    assert latencies.moving(pages, "host", "host") == 0.0
    one_page = latencies.moving(pages[:1]) if len(pages) > 1 else latencies.transfer
    assert 0 < one_page <= latencies.transfer


# -- how good forecasts were -----------------------------------------------------------------------


class Knows:
    """A predictor that knows what a seeded routing will choose, or only the half of it."""

    def __init__(self, plan: Plan, *, half: bool = False) -> None:
        config = plan.layout.config
        self.routing, self.half = SeededRouting(config.routed.experts, config.routed.top_k), half

    def routed(self, layer: int, routed: Routed) -> None: ...

    async def forecast(self, step: Step, layer: int, micro_batches: Sequence[int]) -> Forecast:
        tokens = {j: 1 if step.index else CASE.prompts[j] for j in micro_batches}
        chosen = {j: self.routing.choose(step.index, layer, j, tokens[j]) for j in micro_batches}
        if self.half:
            return {j: dict(list(each.items())[: len(each) // 2]) for j, each in chosen.items()}
        return {j: dict.fromkeys(range(EXPERTS), 0.5) | each for j, each in chosen.items()}


@pytest.mark.parametrize(("half", "low", "high"), [(False, 1.0, 1.0), (True, 0.2, 0.5)])
def test_a_report_tells_how_good_a_predictor_of_ones_own_was(half: bool, low: float, high: float) -> None:
    one_by_one = msgspec.structs.replace(CASE, micro_batch_size=1)
    policy = Prefetching(lambda plan: Knows(plan, half=half))
    report = simulate(one_by_one.plan(policy), policy)
    [use] = report.forecasts
    assert (use.predictor, use.ahead) == ("Knows", 1)
    assert use.forecasts == len(CASE.prompts) * CASE.new_tokens * (LAYERS - 1)
    assert use.accuracy == use.found / use.chosen
    assert low <= use.accuracy <= high


def test_shipped_predictors_are_measured_alike_and_the_routers_as_previews_too() -> None:
    policy = Prefetching(lambda plan: LaterRouters())
    report = simulate(CASE.plan(policy), policy, preview_accuracy=1.0)
    [use], [preview] = report.forecasts, report.previews
    assert (use.predictor, use.ahead, use.accuracy) == ("LaterRouters", 1, 1.0)
    assert (use.forecasts, use.chosen) == (preview.forecasts, preview.chosen)
    policy = Prefetching(FollowingExperts)
    [use] = simulate(CASE.plan(policy), policy).forecasts
    assert use.predictor == "FollowingExperts"
    assert 0 < use.found < use.chosen


def test_successive_batches_add_up_and_the_command_says_it(command: Any) -> None:
    options = "simulate --model mixtral-0.8b --machine t4 --workload uniform --gen 3 --no-band --batch-size 1"
    line = (*options.split(), "--policy", f"{__file__}:Prefetching", "--budget", "gpu=700MB", "--requests")
    [one], [two] = (command(*line, requests, "--json").json["forecasts"] for requests in (1, 2))
    assert two["forecasts"] == 2 * one["forecasts"]
    assert re.search(
        r"\nchosen experts that FollowingExperts forecast: \d+\.\d% 1 layer ahead \(21 forecasts\)\n",
        command(*line, 1).out,
    )

"""The earliest end of a layer: its choice of processors against all possible choices, and in whole runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple

import layer_decision
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesched.calibration.exercise import FinishedTasks
from moesched.dispatch.expert_latencies import ExpertLatencies
from moesched.dispatch.layer_decisions import LayerDecisions
from moesched.dispatch.layer_makespan import FEW, ChosenExperts, LayerDecision, decide
from moesched.machines import load_machine
from moesched.machines.sustained import at_peak
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.runs.simulation import simulate
from moesched.seams import Routing
from moesched.steps.plan import Plan
from moesched.tasks import HostKernel, Task
from moesched.testing import Case, run_on_symbols

DOCS = Path(__file__).parent.parent / "docs"
MIXTRAL = weight_layout(SHAPES["mixtral-8x7b"].varied(layers=8))
TABLE_1 = {"rtx6000": 56 // 4, "rtx6000-ada": 125 // 4}
"""Twiddler's two environments, and the experts of Mixtral that stay on the GPU there."""


class Costs(NamedTuple):
    """Times like a processor's: a step, then a line."""

    transfer: float = 30.0
    host: tuple[float, float] = (6.0, 0.1)
    accelerator: tuple[float, float] = (5.0, 0.01)
    rates: tuple[float, float] = (1.0, 1.0)
    copy: float = 0.01

    def at_host(self, tokens: int) -> float:
        return max(self.host[0], tokens * self.host[1])

    def at_accelerator(self, tokens: int) -> float:
        return max(self.accelerator[0], tokens * self.accelerator[1])

    def to_host(self, tokens: int) -> float:
        return self.copy + 1e-4 * tokens

    def from_host(self, rows: int) -> float:
        return self.copy + 1e-4 * rows

    def side_by_side(self, tokens: int) -> tuple[float, float]:
        return self.rates


TIMES = st.floats(0.01, 50.0)
RATES = st.floats(0.3, 1.0)
COSTS = st.builds(
    Costs,
    transfer=TIMES,
    host=st.tuples(TIMES, st.floats(0.001, 1.0)),
    accelerator=st.tuples(TIMES, st.floats(0.001, 1.0)),
    rates=st.tuples(RATES, RATES),
    copy=st.floats(0.0, 2.0),
)


def tokens(least: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, 400), min_size=least, max_size=most).map(sorted)


def subsets(count: int) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(range(count), size) for size in range(count + 1))


def end_of(layer: ChosenExperts, away: Sequence[int], fetched: Sequence[int]) -> float:
    """The makespan with resident experts `away` on the host, and missing ones `fetched` in this order."""
    left = [m for m in range(len(layer.missing)) if m not in fetched]
    return layer.end(
        sum(layer.resident_there[k] for k in away) + sum(layer.missing_there[m] for m in left),
        sum(here for k, here in enumerate(layer.resident_here) if k not in away),
        [layer.missing_here[m] for m in fetched],
        sum(layer.resident[k] for k in away) + sum(layer.missing[m] for m in left),
    )


def brute_force(layer: ChosenExperts) -> float:
    """The least end of all choices; the experts that are fetched come with the largest first."""
    return min(
        end_of(layer, away, fetched)
        for away in subsets(layer.movable)
        for fetched in subsets(len(layer.missing))
    )


@settings(max_examples=100, deadline=None)
@given(tokens(0, 3), tokens(1, 5), COSTS, st.booleans())
def test_a_decision_is_within_two_percent_of_the_best_of_all(
    kept: list[int], missing: list[int], costs: Costs, resident_on_host: bool
) -> None:
    layer = ChosenExperts(kept, missing[::-1], costs, resident_on_host=resident_on_host)
    choice = decide(layer)
    assert choice.seconds == pytest.approx(end_of(layer, choice.away, choice.fetched))
    assert choice.seconds <= 1.02 * brute_force(layer)
    assert resident_on_host or not choice.away


@settings(max_examples=50, deadline=None)
@given(tokens(0, 40), tokens(FEW + 1, 88), COSTS, st.floats(0.85, 1.0))
def test_with_many_experts_that_share_little_no_threshold_is_much_better(
    kept: list[int], missing: list[int], costs: Costs, rate: float
) -> None:
    costs = costs._replace(rates=(rate, rate))
    layer = ChosenExperts(kept, missing[::-1], costs, resident_on_host=False)
    choice = decide(layer)
    assert choice.seconds == pytest.approx(end_of(layer, choice.away, choice.fetched))
    best = min(end_of(layer, (), range(count)) for count in range(len(missing) + 1))
    assert choice.seconds <= 1.05 * best


@pytest.mark.parametrize(
    ("missing", "fetched"),
    [([1, 1], 0), ([1] * 8, 1), ([200] * 6, 2), ([900] * 6, 5), ([500, 500, 200, 1], 2)],
    ids=[
        "the host is done with both before one has come",
        "one comes while the host computes seven",
        "the host computes four in little more than the time of two fetches",
        "each is faster moved, but the host need not stand idle",
        "the largest are fetched first",
    ],
)
def test_link_and_host_share_a_layer(missing: list[int], fetched: int) -> None:
    assert decide(ChosenExperts([], missing, Costs(), resident_on_host=False)).fetched == tuple(
        range(fetched)
    )


def test_an_expert_that_stays_runs_on_an_idle_host_if_that_has_its_weights() -> None:
    assert decide(ChosenExperts([1, 1], [], Costs(), resident_on_host=True)).away == (0,)
    assert decide(ChosenExperts([1, 1], [], Costs(), resident_on_host=False)).away == ()
    assert decide(ChosenExperts([3], [], Costs(), resident_on_host=False)) == LayerDecision((), (), 5.0)


def test_slower_side_by_side_means_a_later_end_and_fewer_fetches() -> None:
    alone, together = (
        ChosenExperts([], [200] * 6, Costs(rates=rates), resident_on_host=False)
        for rates in ((1.0, 1.0), (0.5, 0.6))
    )
    assert end_of(together, (), (0, 1)) > 1.2 * end_of(alone, (), (0, 1))
    assert end_of(together, (), ()) == end_of(alone, (), ()), "nothing runs beside the host"
    assert decide(together).seconds > decide(alone).seconds


def test_an_expert_costs_a_kernel_for_each_micro_batch_that_chose_it() -> None:
    costs: Any = Costs(copy=0.0)
    decisions = LayerDecisions(costs, on_host=True)
    apart = decisions.divide({0: {0: 2}, 1: {1: 2}}, ())
    together = decisions.divide({0: {0: 1, 1: 1}, 1: {0: 1, 1: 1}}, ())
    assert apart.seconds == pytest.approx(12.0, abs=0.1)
    assert together.seconds == pytest.approx(24.0, abs=0.1)


def test_the_expert_with_the_most_kernels_is_fetched_before_the_one_with_the_most_tokens() -> None:
    costs: Any = Costs(transfer=5.0, accelerator=(1.0, 0.0), copy=0.0)
    division = LayerDecisions(costs, on_host=True).divide({0: {0: 4, 1: 2}, 1: {1: 1}}, ())
    assert (division.fetched, division.on_host) == ([1], [0])


# -- latencies -----------------------------------------------------------------------------------------------------


def test_copies_of_rows_and_contention_are_those_of_the_machines_cost_model() -> None:
    latencies = ExpertLatencies(Plan(at_peak(load_machine("t4")), MIXTRAL, split_batch([2], 2, 1)))
    assert latencies.to_host(100) == pytest.approx(10e-6 + 100 * 4096 * 2 / 12e9)
    assert latencies.from_host(100) == pytest.approx(latencies.to_host(100))
    host, link = latencies.side_by_side(1)
    assert host == link == pytest.approx(1 / (1 + 12 / 100), rel=0.01), "both want more than the memory gives"
    assert latencies.side_by_side(4096) == (1.0, 1.0), "the host computes, and leaves its memory to the link"


@pytest.mark.parametrize("name", TABLE_1)
def test_profiles_of_the_papers_machines_have_its_measured_ratio(name: str) -> None:
    latencies = ExpertLatencies(Plan(at_peak(load_machine(name)), MIXTRAL, split_batch([2], 2, 1)))
    for n in (1, 16, 256, 1024):
        assert 2 <= latencies.transfer / latencies.at_accelerator(n) <= 5.01
    assert latencies.to_host(1) < 0.01 * latencies.at_host(1)


# -- runs ----------------------------------------------------------------------------------------------------------


class SameForAll:
    """A routing in which every layer's experts get these tokens."""

    def __init__(self, tokens: dict[int, int]) -> None:
        self.tokens = tokens

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        return self.tokens


def first_layer(policy: str, routing: Routing, machine: str = "rtx6000") -> list[Task]:
    """Tasks of an expert of layer 0 in one decode step."""
    finished = FinishedTasks()
    made = make_policy(policy, {"experts": TABLE_1[machine]})
    plan = plan_run(at_peak(load_machine(machine)), MIXTRAL, split_batch([4], 2, 1), made)
    simulate(plan, made, routing=routing, observers=[finished])
    return [task for task in finished.tasks if task.layer == 0 and task.step == 1]


def test_a_layer_ends_when_it_was_estimated_to() -> None:
    routing = SameForAll({0: 300, 1: 200, 2: 150, 3: 120, 4: 110, 5: 90, 6: 60, 7: 20})
    tasks = first_layer("twiddler_makespan", routing)
    begin = next(task.end for task in tasks if task.verb == "route")
    end = next(task.start for task in tasks if task.verb == "combine")
    kept = {0, 1}  # 14 of 64 experts, spread evenly over the layers
    assert {task.expert for task in tasks if task.verb == "fetch"}.isdisjoint(kept)
    plan = Plan(at_peak(load_machine("rtx6000")), MIXTRAL, split_batch([4], 2, 1))
    layer = ChosenExperts(
        [200, 300], [150, 120, 110, 90, 60, 20], ExpertLatencies(plan), resident_on_host=True
    )
    assert (end - begin) / 1e9 == pytest.approx(decide(layer).seconds, rel=0.01)


def test_an_idle_cpu_takes_over_an_expert_that_stays() -> None:
    tasks = first_layer("twiddler_makespan", SameForAll({0: 1, 1: 1}))
    assert {isinstance(task, HostKernel) for task in tasks if task.verb == "run_expert"} == {True, False}


@pytest.mark.parametrize("machine", TABLE_1)
def test_a_layer_never_ends_later_than_with_algorithm_1(machine: str) -> None:
    for each in (1, 8, 60, 128, 300, 1024):
        routing = SameForAll(dict.fromkeys(range(8), each))
        ours, theirs = (
            max(task.end for task in first_layer(policy, routing, machine) if task.verb == "combine")
            - min(task.end for task in first_layer(policy, routing, machine) if task.verb == "route")
            for policy in ("twiddler_makespan", "twiddler")
        )
        assert ours <= 1.01 * theirs


def test_a_choice_on_a_machine_whose_host_has_no_copies_leaves_kept_experts_where_they_are() -> None:
    policy: Any = make_policy("twiddler_makespan", {"experts": 6})
    plan = Case(name="unified", machine=at_peak(load_machine("cpu-nvme")), weights=1.5).plan(policy)
    ended = run_on_symbols(policy, plan)
    assert ended.tokens == ended.expected
    assert not plan.declared.resident_experts_on_host
    assert not any(isinstance(task, HostKernel) for task in ended.tasks if task.verb == "run_expert")


def test_the_page_shows_the_picture_that_the_script_draws(tmp_path: Path) -> None:
    layer_decision.main(["--out", str(tmp_path / "layer-decision.svg")])
    drawn = DOCS / "pictures" / "layer-decision.svg"
    assert (tmp_path / drawn.name).read_text().count("<path") == drawn.read_text().count("<path")

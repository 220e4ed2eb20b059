"""The accuracy of previews in reports: of simulations, of runs, of batches, and of runs that fail."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import moesched
from benchmarks.fidelity._previewing import Kept
from meddling import Everything
from moesched.errors import OutOfOrder, TaskFailed, report_of
from moesched.jobs.report import merge_reports
from moesched.machines import load_machine
from moesched.plugins import make_policy
from moesched.routing import SeededRouting
from moesched.runs.outcome import PreviewUse, Report
from moesched.runs.simulation import simulate
from moesched.steps.step import Step
from moesched.testing import Case
from moesched.testing.previewing import Previewing
from scripted_routing import Scripted

CASE = Case(name="previews", machine=load_machine("t4"), layers=4, experts=8, weights=1.5)
MODEL = Path(__file__).parent.parent / "examples" / "tiny-mixtral"


def simulated(policy: Any, case: Case = CASE, **given: Any) -> Report:
    return simulate(case.plan(policy), policy, **given)


def figures(report: Report) -> list[tuple[int, int, int, int]]:
    for each in report.previews:
        assert each.accuracy == pytest.approx(each.found / each.chosen)
    return [(each.ahead, each.forecasts, each.chosen, each.found) for each in report.previews]


def test_a_count_by_hand() -> None:
    # One step of two micro-batches through three layers; layer 1 chooses one expert, layer 2 three of them.
    case = msgspec.structs.replace(CASE, layers=3, new_tokens=1, prompts=(1, 1), micro_batch_size=1)
    routing = Scripted([[{0: 2}, {5: 2}, {1: 1, 2: 2, 7: 1}]])
    exact = simulated(Previewing(), case, routing=routing, preview_accuracy=1.0)
    assert exact.previews == [PreviewUse(1, 4, 8, 8, 1.0), PreviewUse(2, 2, 6, 6, 1.0)]
    wrong = simulated(Previewing(), case, routing=routing, preview_accuracy=0.0)
    assert wrong.previews == [PreviewUse(1, 4, 8, 0, 0.0), PreviewUse(2, 2, 6, 0, 0.0)]


@pytest.mark.parametrize("accuracy", [0.3, 0.8])
def test_simulations_report_what_the_policy_saw(accuracy: float) -> None:
    policy = Kept()
    report = simulated(policy, preview_accuracy=accuracy)
    assert [ahead for ahead, *_ in figures(report)] == [1, 2, 3]
    assert figures(report) == policy.counts()


@pytest.mark.parametrize("given", [{}, {"prefill_chunk": 16}, {"batch_size": 2}], ids=str)
def test_runs_report_what_the_policy_saw(no_text: Path, given: dict[str, Any]) -> None:
    prompts = [[*range(1, 41)], [*range(5, 18)], [9, 8], [3]]
    report = moesched.run_model(
        no_text, prompts, policy="benchmarks.fidelity._previewing:Kept", max_new_tokens=3, **given
    )
    counted = [each.counts() for each in Kept.last(report.batches)]
    assert figures(report) == [
        (rows[0][0], *(sum(column) for column in list(zip(*rows, strict=True))[1:]))
        for rows in zip(*counted, strict=True)
    ]


class Late(Everything):
    """Awaits no preview, and ends with a step whose layers run as one kernel or not at all."""

    def __init__(self, *, fails: bool) -> None:
        self._fails = fails

    async def feed_forward(self, step: Step, i: int, j: int) -> None:
        if i == 2:
            step.post_attention(i, j)
            return
        route = step.route(i, j)
        for later in step.layers[i + 1 :]:
            step.preview_route(later, j)
        for expert in await route:
            step.run_expert(i, expert, j)
        step.combine(i, j)
        if self._fails and (step.index, i) == (1, step.layers[-1]):
            step.sample(99)


def test_previews_count_that_nobody_awaits_unless_their_layer_is_never_routed() -> None:
    report = simulated(Late(fails=False), preview_accuracy=1.0)
    steps, micro_batches = CASE.new_tokens, 2
    of_layer_1 = of_layer_3_from_0 = of_layer_3_from_1 = steps * micro_batches
    assert [(each.ahead, each.forecasts) for each in report.previews] == [
        (1, of_layer_1),
        (2, of_layer_3_from_1),
        (3, of_layer_3_from_0),
    ]


class FirstStep(Everything):
    """Previews layer 1 in prefill, where that layer then runs as one kernel, and no more."""

    async def feed_forward(self, step: Step, i: int, j: int) -> None:
        if (step.index, i) == (0, 1):
            step.post_attention(i, j)
        else:
            await super().feed_forward(step, i, j)

    async def run_experts(self, step: Step, i: int, j: int) -> None:
        routed = await step.route(i, j)
        if (step.index, i) == (0, 0):
            await step.preview_route(1, j)
        for expert in routed:
            step.run_expert(i, expert, j)


def test_a_preview_is_of_its_own_step() -> None:
    assert simulated(FirstStep()).previews == []


def test_a_run_that_fails_reports_the_previews_until_then() -> None:
    with pytest.raises(OutOfOrder) as caught:
        simulated(Late(fails=True))
    report = report_of(caught.value)
    assert [each.ahead for each in report.previews] == [1, 2, 3]
    assert [each.forecasts for each in report.previews] == [3, 3, 3], "one of two micro-batches in step 1"


class Breaks(SeededRouting):
    """A routing that fails in the last layer of step 1, after the three forecasts of it."""

    calls = 0

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        self.calls += (step, layer, micro_batch) == (1, 3, 0)
        if self.calls > 3:
            raise RuntimeError("broken")
        return super().choose(step, layer, micro_batch, tokens)


def test_a_routing_that_failed_counts_for_nothing() -> None:
    with pytest.raises(TaskFailed, match="route L3 mb0 failed") as caught:
        simulated(Previewing(), routing=Breaks(8, 2))
    assert [each.forecasts for each in report_of(caught.value).previews] == [6 + 2, 4 + 1, 2]


def test_a_policy_without_previews_reports_none() -> None:
    assert simulated(Previewing(farthest=0)).previews == []
    assert simulated(make_policy("resident"), replay=True).previews == []


def test_prefetch_gate_reports_its_accuracy(command: Any) -> None:
    asked = (
        "simulate", "--model", "mixtral-0.8b", "--machine", "t4", "--policy", "prefetch_gate", "--workload", "mtbench",
        "--gen", 4, "--batch-size", 1, "--budget", "gpu=700MB",
    )  # fmt: skip
    exact, told = command(*asked, "--preview-accuracy", 1, "--json"), command(*asked)
    [previews] = exact.json["previews"]
    assert (previews["ahead"], previews["accuracy"]) == (1, 1.0)
    layers, steps = 8, 4
    assert previews["forecasts"] == steps * (layers - 1), previews
    assert re.search(
        r"\nchosen experts that previews forecast: \d+\.\d% 1 layer ahead \(28 previews\)\n", told.out
    )


def test_batches_add_up() -> None:
    one, other = (
        moesched.simulate_model(
            MODEL, machine="t4", policy="prefetch_gate", workload="uniform", gen=3, batch_size=1, requests=requests,
            budgets={"gpu": "12MB"},
        )
        for requests in (1, 2)
    )  # fmt: skip
    assert other.batches == 2
    assert other.previews[0].forecasts == 2 * one.previews[0].forecasts > 0
    merged = merge_reports([one, other], requests=3, batches=3).previews
    assert totals(merged) == [
        sum(pair) for pair in zip(totals(one.previews), totals(other.previews), strict=True)
    ]
    assert merged[0].accuracy == merged[0].found / merged[0].chosen


def totals(previews: Sequence[PreviewUse]) -> list[int]:
    [only] = previews
    return [only.forecasts, only.chosen, only.found]

"""The ranking of policies: all of them, for each objective, with what bounds them and what they lack."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from moesched import plugins
from moesched.errors import BadInput
from moesched.inputs.options import Objective
from moesched.machines import load_machine
from moesched.machines.sustained import at_peak
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.planner.candidate import Candidate
from moesched.planner.few_layers import few_layers
from moesched.planner.proposal import plan_model
from moesched.planner.ranking import Ranked, in_order, missing_bytes
from moesched.planner.search_policies import BestPlan, plan_best, plannable
from moesched.planner.setting import Setting, splits_kv
from moesched.planner.trial_run import MOST_STEPS
from moesched.seams import is_expert_parallel
from others_packages import install
from runs import setting

pytestmark = pytest.mark.usefixtures("as_users_run")

T4 = load_machine("t4")
LAYOUT = weight_layout(SHAPES["mixtral-8x7b"])
SMALL = weight_layout(SHAPES["mixtral-0.8b"])
FEW_GPU_BYTES = {"gpu": 900_000_000, "host": 4_000_000_000}


def asking(policy: str, **budgets: int) -> Setting:
    where = setting(policy, budgets, lengths=(100,) * 64, new_tokens=32)
    return replace(where, splits_kv=splits_kv(plugins.find("policies", policy), T4))


@pytest.fixture(scope="module")
def bests() -> dict[Objective, BestPlan]:
    """For one request all policies, for a batch only some of them: their schedules have many tasks."""
    asked: dict[Objective, list[str] | None] = {
        "throughput": ["resident", "cgopipe", "twiddler", "layer_streaming"],
        "latency": None,
        "interactive": ["resident", "twiddler", "twiddler_makespan", "expert_cache", "cgopipe"],
    }
    return {
        objective: plan_best(
            T4,
            SMALL,
            [100] * 512,
            8,
            objective=objective,
            policies=policies,
            budgets=FEW_GPU_BYTES,
            band=False,
        )
        for objective, policies in asked.items()
    }


# -- all policies, best first ------------------------------------------------------------------------------------------


def test_all_policies_that_one_machine_can_run_are_ranked(bests: dict[Objective, BestPlan]) -> None:
    shared = [
        name for name in plugins.names("policies") if is_expert_parallel(plugins.find("policies", name))
    ]
    assert sorted([*plannable(), *shared]) == plugins.names("policies")
    assert sorted(row.policy for row in bests["latency"].ranking) == sorted(plannable())


def test_the_best_policy_comes_first_by_the_figure_of_the_objective(bests: dict[Objective, BestPlan]) -> None:
    def seconds(objective: Objective, row: Ranked) -> float:
        assert row.throughput_tokens_per_second and row.decode_step_seconds and row.first_token_seconds
        if objective == "throughput":
            return 1 / row.throughput_tokens_per_second
        answer = row.first_token_seconds + 7 * row.decode_step_seconds
        return row.decode_step_seconds if objective == "latency" else answer

    for objective, best in bests.items():
        figures = [seconds(objective, row) for row in best.ranking if row.fits]
        assert figures == sorted(figures)
        assert best.policy == best.ranking[0].policy
        assert best.schedule.trial_run.step_seconds == best.ranking[0].decode_step_seconds


def test_latency_and_interactive_are_for_one_request(bests: dict[Objective, BestPlan]) -> None:
    assert bests["throughput"].schedule.batch_size > 100
    for objective in ("latency", "interactive"):
        assert {row.batch_size for row in bests[objective].ranking if row.fits} == {1}


def test_a_batch_wants_another_policy_than_one_request(bests: dict[Objective, BestPlan]) -> None:
    """A batch streams weights that many tokens share; one request runs its few experts where they are."""
    alone = {row.policy: row.decode_step_seconds or 0.0 for row in bests["latency"].ranking}
    assert bests["throughput"].policy == "cgopipe"
    assert alone["cgopipe"] > 2 * alone[bests["latency"].policy]


def test_each_row_tells_its_busiest_lane_and_the_change_that_helps(bests: dict[Objective, BestPlan]) -> None:
    rows = {row.policy: row for row in bests["latency"].ranking}
    assert rows["layer_streaming"].bound_by == "host->gpu"
    gain = rows["layer_streaming"].gain
    assert gain is not None and gain.resource == "host->gpu bandwidth"
    assert gain.share == pytest.approx(0.1, abs=0.01), "nothing but the link takes time"


def test_a_tie_goes_to_the_policy_that_moves_nothing() -> None:
    proposal = plan_model(
        "mixtral-0.8b", machine=at_peak(load_machine("h200")), gen=8, objective="latency", band=False
    )
    first, second = proposal.ranking[:2]
    assert first.policy == "resident"
    assert first.decode_step_seconds == second.decode_step_seconds


def test_installed_plug_ins_are_ranked_and_broken_ones_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_policy.py").write_text(
        "from moesched.policies.cgopipe import CGOPipe\n"
        "class Mine(CGOPipe):\n    pass\n"
        "class Mistaken(CGOPipe):\n    def plan(self, plan):\n        plan.keep(None)\n"
    )
    named = {"mine": "my_policy:Mine", "mistaken": "my_policy:Mistaken", "gone": "no_such_module:Gone"}
    install(tmp_path, monkeypatch, "policies", **named)
    proposal = plan_model(
        "mixtral-0.8b", machine="t4", objective="latency", gen=4, budgets=FEW_GPU_BYTES, band=False
    )
    rows = {row.policy: row for row in proposal.ranking}
    assert rows["mine"].decode_step_seconds == rows["cgopipe"].decode_step_seconds
    assert not rows["mistaken"].fits and "my_policy.py" in (rows["mistaken"].why or "")
    assert not rows["gone"].fits and "no_such_module" in (rows["gone"].why or "")


# -- a few layers stand for all ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["cgopipe", "flexgen", "expert_streaming", "expert_cache"])
def test_a_few_layers_tell_what_all_of_them_come_to(policy: str) -> None:
    candidate = Candidate(policy, asking(policy))
    every = candidate.schedules.deepened(candidate.first_trial())
    assert every.few is not None
    few = every.few.trial(MOST_STEPS)
    assert few.layers < every.trial_run.layers == 32
    assert few.tasks < every.trial_run.tasks / 1.5
    assert few.tokens_per_second(every.few.batch) == pytest.approx(every.throughput, rel=0.05)
    assert few.step_seconds == pytest.approx(every.trial_run.step_seconds, rel=0.05)


def test_a_policy_far_from_the_best_is_simulated_whole_where_that_takes_few_tasks() -> None:
    """A few layers of one request are far off: what a step takes beside layers counts several times."""
    layout = weight_layout(SHAPES["qwen3-30b-a3b"])
    policies = ["resident", "expert_cache"]
    best = plan_best(load_machine("h100"), layout, [100], 32, objective="interactive", policies=policies)
    first, second = best.ranking
    assert (first.policy, second.policy, second.estimate) == ("resident", "expert_cache", False)
    assert second.decode_step_seconds and first.decode_step_seconds
    assert second.decode_step_seconds < 1.3 * first.decode_step_seconds


def test_a_high_estimate_stands_below_a_row_of_all_layers() -> None:
    rows = [(3.0, Ranked(policy="guessed", fits=True, estimate=True))]
    rows += [(rate, Ranked(policy=f"whole {rate:g}", fits=True)) for rate in (1.0, 2.0)]
    misfit = Ranked(policy="large", fits=False)
    assert [row.policy for row in in_order(rows, [misfit])] == ["whole 2", "whole 1", "guessed", "large"]


def test_a_cut_model_has_as_large_a_part_outside_its_layers() -> None:
    whole = SHAPES["mixtral-8x7b"]
    few = few_layers(whole, 4)
    assert (few.layers, few.vocabulary) == (4, whole.vocabulary // 8)
    assert weight_layout(few).globals_bytes == pytest.approx(LAYOUT.globals_bytes / 8, rel=0.01)


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_the_missing_bytes_are_exactly_those_that_would_do() -> None:
    [(memory, missing)] = missing_bytes(asking("resident")).items()
    assert memory == "gpu"
    enough = T4.memories["gpu"].nbytes + missing
    roomy, tight = asking("resident", gpu=enough), asking("resident", gpu=enough - 1)
    roomy.plan(roomy.batch(1, 1))
    with pytest.raises(BadInput):
        tight.plan(tight.batch(1, 1))


def test_the_missing_bytes_of_a_policy_that_adapts_are_those_of_its_least_plan() -> None:
    [(memory, missing)] = missing_bytes(asking("cgopipe", gpu=10**9)).items()
    assert memory == "gpu"
    enough = asking("cgopipe", gpu=10**9 + missing)
    enough.plan(enough.batch(1, 1))
    short = asking("cgopipe", gpu=10**9 + int(0.97 * missing))
    with pytest.raises(BadInput):
        short.plan(short.batch(1, 1))


def test_a_policy_that_does_not_fit_is_last_with_what_it_lacks() -> None:
    best = plan_best(T4, LAYOUT, [100] * 8, 8, objective="latency", policies=["resident", "cgopipe"])
    assert [row.policy for row in best.ranking] == ["cgopipe", "resident"]
    last = best.ranking[-1]
    assert not last.fits and last.throughput_tokens_per_second is None
    assert last.missing == {"gpu": last.missing_bytes}
    assert last.lacks == "78.1 GB more gpu would"


def test_where_nothing_fits_the_ranking_says_what_is_missing(command: Any) -> None:
    line = "plan --model mixtral-8x7b --machine t4 --for latency --budget host=9GB --json"
    said = command(*line.split())
    assert (said.code, said.json["plan"]) == (2, None)
    assert all(not row["fits"] and row["missing_bytes"] > 60e9 for row in said.json["ranking"])
    assert {row["policy"] for row in said.json["ranking"]} == set(plannable())
    assert said.err.count("\n") == 1
    assert re.search(r"would fit with [0-9.]+ GB more host$", said.err)
    assert "--batch-size" not in said.err, "the planner chose the sizes"


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_prints_the_plan_and_the_ranking_that_others_rely_on(command: Any) -> None:
    line = "plan --model mixtral-0.8b --machine t4 --gen 8 --for interactive --budget gpu=900MB --no-band"
    told = command(*line.split()).out
    [policy] = re.findall(r"^policy +(\w+)$", told, re.MULTILINE)
    printed = command(*line.split(), "--policy", policy, "--json").json
    plan = "batch_size micro_batch_size attention_on_gpu ffn_on_gpu weights_on_gpu kv_on_gpu"
    predicted = "throughput_tokens_per_second decode_step_seconds bound_by peak_bytes"
    row = "policy throughput_tokens_per_second decode_step_seconds first_token_seconds bound_by fits missing_bytes"
    assert printed["plan"].keys() >= {*plan.split()}
    assert printed["predicted"].keys() >= {*predicted.split()}
    assert all(each.keys() >= {*row.split()} for each in printed["ranking"])
    assert "best plan for interactive" in told
    assert f"batch, micro-batches of  {printed['plan']['batch_size']}" in told
    assert f"{printed['predicted']['bound_by']} is the bottleneck" in told
    assert "policies for interactive" in told
    assert "resident does not fit: " in told and "more gpu would" in told
    assert printed["band"] is None and "least certain rate" not in told


def test_the_command_says_in_what_chunks_prompts_are_computed(command: Any) -> None:
    line = "plan --model mixtral-0.8b --machine t4 --gen 8 --policy layer_streaming --no-band"
    told = command(*line.split(), "--budget", "gpu=2GB", "--budget", "host=4GB").out
    assert "prefill in chunks of     4096 tokens" in told


def test_an_objective_that_there_is_not_is_told_from_python_too() -> None:
    with pytest.raises(BadInput, match="--for is 'speed': choose throughput, latency, interactive"):
        plan_model("mixtral-0.8b", machine="t4", objective="speed")  # type: ignore[arg-type]  # as a caller may

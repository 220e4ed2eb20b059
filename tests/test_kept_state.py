"""State of policies: kept over batches where they declare it, and seen in predictions, which repeat steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import moesched
from moesched.drivers.capture import NotFixed
from moesched.errors import PolicyError
from moesched.jobs.report import JobReport
from moesched.plugins import find
from moesched.policies.layer_streaming import LayerStreaming
from moesched.runs.batch_policies import BatchPolicies
from moesched.runs.simulation import simulate
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.testing import check_policy
from policies_for_tests import Diary, Keeping
from runs import make_plan

EXAMPLES = Path(__file__).parent.parent / "examples"
FIXED = ("layer_streaming", "flexgen", "flexgen_pipeline", "resident")
"""Policies whose decode steps are alike, on lanes that do not share a memory."""


def simulated(policy: str, new_tokens: int = 12, **options: Any) -> JobReport:
    """A prediction of small batches."""
    defaults: dict[str, Any] = {"batch_size": 2, "workload": "uniform", "machine": "t4"}
    return moesched.simulate_model(
        "mixtral-0.8b", policy=policy, gen=new_tokens, band=False, **defaults | options
    )


def diaries(policy: type[Diary], run: Any) -> list[Diary]:
    """The diaries of a run, those of the search for sizes among them."""
    Diary.made.clear()
    run(f"{policy.__module__}:{policy.__name__}")
    return Diary.made


def test_an_object_serves_all_batches_of_a_run_if_its_class_declares_it() -> None:
    made = diaries(Keeping, lambda policy: simulated(policy, requests=6))
    assert [diary.planned for diary in made if diary.planned[1:]] == [[0, 2, 4]]
    assert 3 * 11 in [diary.steps for diary in made]
    made = diaries(Diary, lambda policy: simulated(policy, requests=6))
    assert sorted(diary.planned for diary in made if diary.steps == 11) == [[0], [2], [4]]
    policies = BatchPolicies(Keeping)
    first, second = policies.next_of(0), policies.next_of(1)
    assert first is not second, "each rank keeps its own"
    assert [policies.next_of(0), policies.next_of(1)] == [first, second]


# -- steps that are repeated -----------------------------------------------------------------------


class Counts(LayerStreaming):
    """Forgets the last layer from its sixth call on."""

    def __init__(self) -> None:
        self.calls = 0

    async def decode(self, step: Step) -> None:
        self.calls += 1
        if self.forgets(step):
            return
        await super().decode(step)

    def forgets(self, step: Step) -> bool:
        return self.calls > 5


class Numbers(Counts):
    """Does so by the number of the step."""

    async def decode(self, step: Step) -> None:
        if not self.forgets(step):
            await LayerStreaming.decode(self, step)

    def forgets(self, step: Step) -> bool:
        return step.index > 5


class CountsByClass(Numbers):
    """Does so by a number of its class."""

    calls_of_all = 0

    def forgets(self, step: Step) -> bool:
        type(self).calls_of_all += 1
        return self.calls_of_all > 5


class KeepsACount(Counts):
    """Does so over all batches, in the first decode step of the second one."""

    keeps_state = True

    def forgets(self, step: Step) -> bool:
        return self.batches > 1

    def plan(self, plan: Plan) -> None:
        self.batches = getattr(self, "batches", 0) + 1
        super().plan(plan)


class CountsDeep(Numbers):
    """Does so by a list in a list."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = [[]]

    def forgets(self, step: Step) -> bool:
        self.seen[0].append(1)
        return len(self.seen[0]) > 5


class CountsUnseen(Numbers):
    """Does so by what cannot be compared."""

    def __init__(self) -> None:
        self.numbers = (number for number in range(100))

    def forgets(self, step: Step) -> bool:
        return next(self.numbers) > 4


@pytest.mark.parametrize("make", [Counts, Numbers, CountsByClass, CountsDeep, CountsUnseen])
def test_a_step_that_may_differ_from_the_one_before_is_not_repeated(make: type[Counts]) -> None:
    CountsByClass.calls_of_all = 0
    policy = make()
    with pytest.raises(NotFixed) as raised:
        simulate(make_plan(policy, new_tokens=12), policy, sharing=False, replay=True)
    assert isinstance(raised.value.__cause__, PolicyError)
    assert "step 6" in str(raised.value.__cause__)


def test_a_policy_that_keeps_state_is_simulated_whole() -> None:
    assert simulated("policies_for_tests:Keeping").simulated_steps == 12


@pytest.mark.parametrize("policy", FIXED)
def test_shipped_policies_whose_steps_are_alike_are_still_repeated(policy: str) -> None:
    simulated_steps = simulated(policy, new_tokens=20, requests=4).simulated_steps
    assert simulated_steps is not None
    assert simulated_steps <= 2 * 5


def test_a_prediction_says_how_many_steps_were_simulated(command: Any) -> None:
    options = "simulate --model mixtral-0.8b --machine t4 --policy resident --workload uniform --batch-size 2"
    said = command(*options.split(), "--gen", 20)
    assert "simulated 4 of 20 steps: the others repeat the last one, with longer KV caches" in said.out
    assert "steps" not in command(*options.split(), "--gen", 3).out


def test_the_conformance_suite_finds_a_policy_that_forgets_an_operation_in_a_later_step_or_batch() -> None:
    with pytest.raises(PolicyError, match=r"step \d+ ended before mb0 was sampled"):
        check_policy(Counts)
    with pytest.raises(PolicyError, match="step 1"):
        check_policy(KeepsACount)


# -- MoE-Infinity, outside the tree ----------------------------------------------------------------

LEARNS, FORGETS = (f"{EXAMPLES / 'moe_infinity.py'}:{name}" for name in ("MoEInfinity", "Forgetful"))


def test_a_policy_outside_the_tree_learns_from_batch_to_batch_and_changes_no_token() -> None:
    def run(policy: str, **settings: int) -> JobReport:
        prompts = ["Return a new", "def add(self, x):", "for i in range("]
        return moesched.run_model(
            EXAMPLES / "tiny-mixtral",
            prompts,
            policy=policy,
            settings=settings,
            max_new_tokens=12,
            batch_size=1,
            dtype="float32",
        )

    learns, forgets, resident = run(LEARNS, experts=8), run(FORGETS, experts=8), run("resident")
    assert learns.tokens == forgets.tokens == resident.tokens
    assert learns.batches == 3
    assert learns.pools[0].hits > forgets.pools[0].hits
    assert learns.forecasts[0].accuracy > forgets.forecasts[0].accuracy
    check_policy(find("policies", LEARNS))

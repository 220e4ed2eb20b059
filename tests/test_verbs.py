"""The table of verbs, and the pictures of it in the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meddling import CASE, Everything
from moesched.machines import load_machine
from moesched.plugins import make_policy
from moesched.steps import step
from moesched.steps.plan import Plan
from moesched.steps.verbs.page import TABLE, overview, page
from moesched.steps.verbs.table import VERBS, paths, picture
from moesched.tasks import Kernel, Lane
from moesched.testing import Case, run_on_symbols
from moesched.testing.symbolic.attention import Attention
from moesched.testing.symbolic.batch import SymbolicBatch
from moesched.testing.symbolic.device import SymbolicDevice, verbs_of
from moesched.testing.symbolic.exchanges import Board
from moesched.testing.symbolic.experts import Experts
from moesched.work import Work

ROOT = Path(__file__).resolve().parents[1]
REMEDY = "run python -m moesched.steps.verbs.page docs"


def test_the_page_of_verbs_is_the_one_that_the_table_gives() -> None:
    assert (ROOT / "docs" / "verbs.md").read_text() == page(), REMEDY


def test_the_table_of_verbs_in_the_guide_is_the_one_that_the_table_gives() -> None:
    assert TABLE.findall((ROOT / "docs" / "policies.md").read_text()) == [overview()], REMEDY


def test_the_picture_in_the_steps_docstring_is_the_one_that_the_table_gives() -> None:
    shown = [line.strip() for line in (step.__doc__ or "").splitlines() if "-->" in line]
    assert shown == picture().splitlines()


def test_a_verb_is_a_method_of_a_step_and_its_number_is_its_place_in_the_table() -> None:
    assert [verb.number for verb in VERBS] == list(range(len(VERBS)))

    assert {verb.name for verb in VERBS} <= set(dir(step.Step))


def test_the_picture_shows_every_verb_that_moves_a_micro_batch_once() -> None:
    shown = [verb.name for path in paths() for verb in path]
    assert sorted(shown) == sorted(verb.name for verb in VERBS if verb.leaves != verb.needs)


def a_plan() -> Plan:
    return Case(name="small", machine=load_machine("t4")).plan(make_policy("resident"))


def test_the_symbolic_device_has_an_entry_for_every_verb_of_the_table_that_has_a_task() -> None:
    plan = a_plan()
    batch = SymbolicBatch(plan)
    entries = verbs_of(plan, Attention(batch), Experts(batch), Board())
    assert {verb.name for verb in VERBS if verb.lane} <= entries.keys()


def test_the_symbolic_device_names_a_verb_without_an_entry() -> None:
    device = SymbolicDevice()
    device.begin(a_plan())
    task = Kernel(Lane("accelerator"), Work("unknown", "gpu"), "transmogrify", 2, 1)
    with pytest.raises(NotImplementedError, match=r"transmogrify L2 mb1: .* has no verb transmogrify"):
        device.execute(task)


class CountsWithNumpy(Everything):
    """Takes its numbers from arrays."""

    def plan(self, plan: Plan) -> None:
        super().plan(plan)
        numbers: Any = np.array([2, 3])
        plan.limit_in_flight(numbers[0])
        plan.task_limit = np.array([plan.task_limit])[0]
        plan.pool("accelerator", "spare", numbers[1], plan.layout.layer(0)[:1])

    async def prefill(self, step: Any) -> None:
        for j in np.array(step.micro_batches):
            step.embed(j)
            for i in np.arange(len(step.layers)):
                step.pre_attention(i, j)
                step.attention(i, j)
                for expert in np.array(sorted(await step.route(i, j))):
                    step.run_expert(i, expert, j)
                if i + 1 in step.layers:
                    step.preview_route(i + 1, j)
                step.combine(i, j)
            step.sample(j)

    decode = prefill


def test_numbers_of_numpy_become_plain_integers_which_traces_and_reports_can_hold() -> None:
    policy = CountsWithNumpy()
    ended = run_on_symbols(policy, CASE.plan(policy))
    assert ended.tokens == ended.expected
    numbers = [(task.layer, task.expert, task.micro_batch, getattr(task, "ahead", 0)) for task in ended.tasks]
    assert {type(each) for task in numbers for each in task} == {int}

"""Priorities of kernels: a lane runs urgent ones first and speculative ones last, on every clock and in replays."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from engine_script import Script
from meddling import refused
from moesched.policies.cgopipe import CGOPipe
from moesched.policies.resident import Resident
from moesched.runs.simulation import simulate
from moesched.steps.step import Step
from moesched.steps.verbs.base import Priority
from moesched.tasks import DEMAND, IDLE, PREFETCH, URGENT, class_of
from moesched.testing import check_policy
from runs import FORTY_PERCENT, Ended, make_plan, virtual_run


@given(st.lists(st.sampled_from([URGENT, DEMAND, PREFETCH, IDLE]), min_size=1, max_size=12))
def test_of_the_kernels_that_are_ready_the_lowest_class_runs_first_and_then_program_order(
    classes: list[int],
) -> None:
    script = Script(accelerator="ready_first")
    script.submit("running", "accelerator")
    for number, urgency in enumerate(classes):
        script.submit(f"{number}", "accelerator", urgency=urgency)
    expected = sorted(range(len(classes)), key=lambda number: (classes[number], number))
    assert script.run() == ["running", *map(str, expected)]


def test_a_lane_that_keeps_to_program_order_does_so() -> None:
    script = Script(accelerator="in_order")
    for name, urgency in (("running", DEMAND), ("speculative", IDLE), ("urgent", URGENT)):
        script.submit(name, "accelerator", urgency=urgency)
    assert script.run() == ["running", "speculative", "urgent"]


class Urged(CGOPipe):
    """CGOPipe whose accelerator sends queries to the host before it goes on with experts."""

    def __init__(self, priority: Priority = "urgent") -> None:
        super().__init__(ahead=3)
        self.priority = priority

    def _launch(self, step: Step, i: int, j: int) -> None:
        with step.priority(self.priority):
            super()._launch(step, i, j)


class Favours(Resident):
    """Submits one micro-batch after the other; the second one goes first."""

    async def decode(self, step: Step) -> None:
        for j in step.micro_batches:
            with step.priority("urgent" if j == 1 else "normal"):
                step.embed(j)
                for i in step.layers:
                    step.pre_attention(i, j)
                    step.attention(i, j)
                    step.post_attention(i, j)
                step.sample(j)


def test_a_lane_runs_the_kernels_of_an_urgent_block_first() -> None:
    slices = virtual_run(Favours(), requests=3, micro_batch_size=1).recording.slices
    ends = {
        each.end: each.task.micro_batch for each in slices if each.task.verb == "sample" and each.step == 1
    }
    assert [ends[end] for end in sorted(ends)] == [1, 0, 2]


def test_a_priority_holds_for_the_kernels_of_its_block_and_for_no_transfer() -> None:
    policy, seen = Urged(), Ended()
    simulate(make_plan(policy, budgets=FORTY_PERCENT), policy, observers=[seen])
    classes: dict[str, set[int]] = defaultdict(set)
    for task in seen.tasks:
        if task.step > 0:
            classes[task.verb].add(class_of(task))
    assert classes["pre_attention"] == classes["cpu_attention"] == {URGENT}
    assert classes["post_attention"] == classes["offload_qkv"] == classes["sample"] == {DEMAND}


def test_a_trace_names_the_class() -> None:
    slices = virtual_run(Urged(), budgets=FORTY_PERCENT).recording.slices
    assert {each.task.priority_class for each in slices if each.task.verb == "cpu_attention"} == {URGENT}


def test_priorities_change_no_token() -> None:
    check_policy(Urged)


def test_another_priority_is_refused_at_the_policys_line() -> None:
    class Wrong(CGOPipe):
        async def prefill(self, step: Step) -> None:
            with step.priority("high"):  # type: ignore[arg-type]  # a policy that errs
                await super().prefill(step)

    said = str(refused(Wrong()))
    assert "priority: there is no priority 'high': give one of 'urgent', 'normal', 'speculative'" in said

"""Experts run on ranges of rows, and on several micro-batches at once: the same bits, whatever is cut or joined."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.shared.small_runs import ONE_MEMORY
from cut_rows import partition
from moesched import plugins, run_model
from moesched.dispatch import LayerByLayer, Routed, users_of
from moesched.errors import NotResident, OutOfOrder, PolicyError
from moesched.jobs.sparsity import sparsity_of
from moesched.machines import Machine, load_machine
from moesched.machines.roofline import Roofline
from moesched.models.operations import Amount
from moesched.runs.ranks import Rank
from moesched.runs.virtual_run import VirtualRun
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.tasks import HostKernel, Task
from moesched.testing import Case, check_device, check_policy, policy_cases, run_on_symbols
from moesched.testing.policy_checks import node_cases
from moesched.testing.random_rows import RandomRows
from moesched.trace import About, Recorder, read_trace, write_trace

T4 = load_machine("t4")
RANDOM_ROWS = "moesched.testing.random_rows:RandomRows"

# -- the same bits -------------------------------------------------------------------------------------------------


def test_chunks_of_long_prompts_are_cut_and_joined_too(model: Path) -> None:
    prompts = [[*range(1, 71)], [*range(5, 18)], [*range(9, 54)]]
    chunked: dict[str, Any] = {"max_new_tokens": 4, "prefill_chunk": 24, "micro_batch_size": 2}
    both = (RANDOM_ROWS, "resident")
    cut, whole = (run_model(model, prompts, policy=policy, **chunked) for policy in both)
    assert cut.tokens == whole.tokens
    seen, all_seen = (sparsity_of(model, [[1, 2, 3, 4, 5], [9, 8]], policy=policy) for policy in both)
    assert (seen.values, seen.below) == (all_seen.values, all_seen.below), (
        "each row's activations are reported once"
    )


# -- on symbols ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(2))
def test_random_cuts_and_joins_pass_the_suite_of_policies(seed: int) -> None:
    roomy = [case for case in policy_cases() if case.weights > 1]
    assert check_policy(lambda: RandomRows(seed)) == len(roomy)


class OnNodes(LayerByLayer):
    """Each node runs an expert of its own on all micro-batches at once, or on halves of each one's rows."""

    expert_parallel = True

    def plan(self, plan: Plan) -> None:
        experts, nodes = range(plan.layout.config.routed.experts), plan.nodes.count
        plan.place_kv("accelerator")
        plan.place_experts([frozenset(experts[node::nodes]) for node in range(nodes)])

    def run_experts(self, step: Step, i: int, routed: Routed) -> None:
        for j, chosen in routed.items():
            step.assign(i, j, {expert: expert % step.nodes for expert in chosen})
        for expert, micro_batches in users_of(routed).items():
            if expert % step.nodes == step.node and expert < 2:
                step.run_expert(i, expert, micro_batches)
            elif expert % step.nodes == step.node:
                for j in micro_batches:
                    for rows in partition(Random(i), routed[j][expert], most=2):
                        step.run_expert(i, expert, j, rows=rows)


def test_each_of_several_nodes_cuts_and_joins_its_own_experts() -> None:
    cases = [case for case in node_cases() if case.nodes == 2]
    assert check_policy(OnNodes, cases, ["virtual", "real"]) == len(cases)


class Scripted(LayerByLayer):
    """Runs the experts of the first layer of prefill as a test says, and those of all others one by one."""

    def __init__(self, script: Callable[[Step, Routed], object], machine: Machine = T4) -> None:
        self.script = script
        self.machine = machine

    def plan(self, plan: Plan) -> None:
        plan.place_kv("accelerator")
        plan.keep(plan.layout.pages)
        plan.run_experts_on_host(resident=True)

    def run_experts(self, step: Step, i: int, routed: Routed) -> None:
        if step.index or i:
            for j in routed:
                for expert in routed[j]:
                    step.run_expert(i, expert, j)
        else:
            self.script(step, routed)


CASE = Case(name="scripted", machine=T4, layers=2, experts=2, prompts=(5, 6, 7, 4), new_tokens=2, weights=1.5)
"""Every expert has all tokens: 11 of micro-batch 0, 11 of micro-batch 1."""


def run_script(script: Callable[[Step, Routed], object], case: Case = CASE) -> list[Task]:
    policy = Scripted(script)
    ended = run_on_symbols(policy, case.plan(policy))
    assert ended.tokens == ended.expected
    return [task for task in ended.tasks if (task.step, task.layer) == (0, 0) and "_expert" in task.verb]


@settings(max_examples=15)
@given(st.randoms(use_true_random=False))
def test_any_cut_of_the_rows_is_taken_in_any_order_and_none_may_be_left_out(choose: Random) -> None:
    parts = [(e, j, rows) for e in (0, 1) for j in (0, 1) for rows in partition(choose, 11, most=11)]
    choose.shuffle(parts)

    def run_parts(step: Step, routed: Routed) -> None:
        for expert, j, rows in parts:
            step.run_expert(0, expert, j, rows=rows)

    assert len(run_script(run_parts)) == len(parts)
    expert, j, rows = parts.pop()
    left = f" (rows {rows.start}:{rows.stop})" if len(rows) < 11 else ""
    said = re.escape(f"mb{j} was routed to E{expert}{left}, which did not run")
    with pytest.raises(OutOfOrder, match=said):
        run_script(run_parts)


# -- what is refused -----------------------------------------------------------------------------------------------


def run_all(step: Step, routed: Routed) -> None:
    for expert in (0, 1):
        step.run_expert(0, expert, [0, 1])


REFUSED: dict[str, tuple[Callable[[Step], object], type[PolicyError], str]] = {
    "no range": (
        lambda step: step.run_expert(0, 0, 0, rows=(0, 5)),  # type: ignore[arg-type]  # a policy may err
        PolicyError,
        r"run_expert: rows is \(0, 5\), no range of rows of E0 of L0 mb0: give one such as range\(0, 11\)",
    ),
    "an empty range": (lambda step: step.run_expert(0, 0, 0, rows=range(3, 3)), PolicyError, "no range of"),
    "steps": (lambda step: step.run_expert(0, 0, 0, rows=range(0, 9, 2)), PolicyError, "no range of rows"),
    "beyond the end": (
        lambda step: step.run_expert(0, 0, 0, rows=range(5, 12)),
        PolicyError,
        "run_expert: rows 5:12 go beyond E0 of L0 mb0, which has rows 0:11",
    ),
    "before the start": (lambda step: step.run_expert(0, 0, 0, rows=range(-1, 2)), PolicyError, "go beyond E0"),
    "an overlap": (
        lambda step: [step.run_expert(0, 0, 0, rows=rows) for rows in (range(3, 6), range(5, 9))],
        OutOfOrder,
        "run_expert: of rows 5:9 of E0 of L0 mb0 some have run already: rows 0:3 and 6:11 are left",
    ),
    "all of it after a part": (
        lambda step: [step.run_expert(0, 0, 0, rows=range(6)), step.run_expert(0, 0, 0)],
        OutOfOrder,
        r"a part of E0 of L0 mb0 has run already: run what is left of it, rows 6:11, such as rows=range\(6, 11\)",
    ),
    "all of it with others after a part": (
        lambda step: [step.run_expert(0, 0, 1, rows=range(6)), step.run_expert(0, 0, [0, 1])],
        OutOfOrder,
        "a part of E0 of L0 mb1 has run already",
    ),
    "a part after all of it": (
        lambda step: [step.run_expert(0, 0, 0), step.run_expert(0, 0, 0, rows=range(2))],
        OutOfOrder,
        "L0 mb0 has no tokens for E0, or it has run already",
    ),
    "no micro-batch": (lambda step: step.run_expert(0, 0, []), PolicyError, "no micro-batch is named"),
    "one twice": (lambda step: step.run_expert(0, 0, [0, 1, 0]), PolicyError, "mb0 is named twice"),
    "rows of several": (
        lambda step: step.run_expert(0, 0, [0, 1], rows=range(2)),
        PolicyError,
        "rows are those of one micro-batch: call it for each of them",
    ),
    "one that does not exist": (
        lambda step: step.run_expert(0, 0, [0, 2]),
        OutOfOrder,
        "run_expert: there is no mb2 in this step: they are mb0 to mb1",
    ),
    "no number": (lambda step: step.run_expert(0, 0, None), OutOfOrder, "no micro-batch None"),  # type: ignore[arg-type]
    "a list in a list": (lambda step: step.run_expert(0, 0, [[0]]), OutOfOrder, r"no micro-batch \[0\]"),  # type: ignore[list-item]
    "another layer": (lambda step: step.run_expert(1, 0, [0, 1]), OutOfOrder, "needs mb0 at step 0 L1 routed"),
    "not on the host": (
        lambda step: [step.offload_routed(0, 0), step.run_expert(0, 0, [0, 1], at="host")],
        OutOfOrder,
        "L0 mb1 is not on the host: call offload_routed before",
    ),
    "no processor": (
        lambda step: step.run_expert(0, 0, [0, 1], at="gpu"),  # type: ignore[arg-type]
        PolicyError,
        "no processor is 'gpu'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", REFUSED)
def test_a_call_is_refused_at_its_line(call: str) -> None:
    make_call, kind, said = REFUSED[call]
    with pytest.raises(PolicyError, match=said) as caught:
        run_script(lambda step, routed: make_call(step))
    assert type(caught.value) is kind
    assert any(Path(entry.path).name == Path(__file__).name for entry in caught.traceback)


@pytest.mark.parametrize(
    "call",
    [
        lambda step: step.run_expert(0, 0, [0, 1, 2]),
        lambda step: step.run_expert(0, 0, [1, 0], at="host"),
        lambda step: step.run_expert(0, 0, 0, rows=range(7, 12)),
    ],
)
def test_a_refused_call_changes_nothing(call: Callable[[Step], object]) -> None:
    def insist(step: Step, routed: Routed) -> None:
        with pytest.raises(PolicyError):
            call(step)
        run_all(step, routed)

    assert len(run_script(insist)) == 2


def test_a_task_of_several_micro_batches_whose_weights_are_not_there_is_refused_as_a_whole() -> None:
    class NotThere(Scripted):
        def plan(self, plan: Plan) -> None:
            plan.place_kv("accelerator")
            experts = [page for page in plan.layout.pages if page.expert >= 0]
            self.pool = plan.pool("accelerator", "experts", len(experts), experts, "none", filled=experts[2:])
            plan.keep([page for page in plan.layout.pages if page.expert < 0])

    def fetch_late(step: Step, routed: Routed) -> None:
        with pytest.raises(NotResident, match="page L0 E0 #0 is not in gpu: fetch it before"):
            step.run_expert(0, 0, [0, 1])
        for expert in (0, 1):
            step.fetch(step.expert_pages(0, expert), policy.pool)
        run_all(step, routed)

    policy = NotThere(fetch_late)
    ended = run_on_symbols(policy, msgspec.structs.replace(CASE, weights=2.0).plan(policy))
    assert ended.tokens == ended.expected


# -- costs, labels and traces --------------------------------------------------------------------------------------


def cut_and_joined(step: Step, routed: Routed) -> None:
    step.run_expert(0, 0, [0, 1])
    step.offload_routed(0, 1)
    step.run_expert(0, 1, 1, rows=range(6, 9), at="host")
    step.run_expert(0, 1, 1, rows=range(9, 11), at="host")
    step.run_expert(0, 1, 1, rows=range(3, 6))
    step.run_expert(0, 1, 1, rows=range(3))
    step.run_expert(0, 1, 0, rows=range(11))
    step.load_routed(0, 1)


LABELS = [
    "run_expert L0 E0 mb0 mb1",
    "run_expert L0 E1 mb0",
    "run_expert L0 E1 mb1 rows 0:3",
    "run_expert L0 E1 mb1 rows 3:6",
    "run_expert L0 E1 mb1 rows 6:9",
    "run_expert L0 E1 mb1 rows 9:11",
]


def test_a_task_costs_the_sum_of_its_rows_and_reads_the_weights_once() -> None:
    tasks = {task.label: task for task in run_script(cut_and_joined)}
    assert sorted(tasks) == LABELS
    operations = Plan(T4, CASE.layout(), CASE.plan(Scripted(run_all)).batch).operations
    cost = Roofline(T4, "bfloat16")
    for (label, task), rows in zip(sorted(tasks.items()), (22, 11, 3, 3, 3, 2), strict=True):
        amount = (
            operations.fetched_expert(rows)
            if task.work.resource == "cpu"
            else operations.resident_expert(rows)
        )
        assert (task.work.tokens, Amount(task.work.flops, task.work.nbytes, task.work.parts)) == (
            rows,
            amount,
        ), label
        assert isinstance(task, HostKernel) == (label in LABELS[4:])
        assert task.end - task.start == round(cost.work(task.work).seconds * 1e9)


def test_only_rows_that_ran_on_the_host_come_back() -> None:
    policy = Scripted(cut_and_joined)
    plan = CASE.plan(policy)
    moved = [task.work.nbytes for task in run_on_symbols(policy, plan).tasks if task.verb == "load_routed"]
    assert moved == [5 * plan.operations.hidden_bytes]


def test_traces_tell_the_micro_batches_and_the_rows(tmp_path: Path) -> None:
    recorder, policy = Recorder(), Scripted(cut_and_joined)
    VirtualRun([Rank(CASE.plan(policy), policy)], sharing=False, recorder=recorder).run()
    write_trace(tmp_path / "trace.json", recorder.recording(), About(driver="virtual"))
    slices = read_trace(tmp_path / "trace.json").recording.slices
    first = [each.task for each in slices if each.step == 0 and each.task.layer == 0]
    told = {each.label: each for each in first if each.verb == "run_expert"}
    assert sorted(told) == LABELS
    assert [told[label].micro_batch for label in LABELS] == [-1, 0, 1, 1, 1, 1]


# -- devices of others ---------------------------------------------------------------------------------------------


# -- devices of others ---------------------------------------------------------------------------------------------


def test_a_device_that_knows_no_parts_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1] / "examples")

    class Older(plugins.find("devices", "own_device:NumpyDevice")):  # type: ignore[misc]  # found by name
        def _run_expert(self, task: Task) -> None:
            self._apply(self._micro_batches[task.micro_batch], task.expert, self._weights(task.operands))

    with pytest.raises(AssertionError, match="RandomRows does not give the tokens of resident"):
        check_device(Older, ONE_MEMORY, ["resident", RANDOM_ROWS])

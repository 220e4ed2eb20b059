"""The shipped policies: conformance, CGOPipe's order against the paper, and when keys and values move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest

from clocks_in_turn import PLAIN, in_turn
from meddling import Everything
from moesched import plugins
from moesched.errors import BadInput, NotResident, OutOfOrder, PolicyError
from moesched.machines import load_machine
from moesched.machines.staging import staged
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.steps.plan import Plan
from moesched.steps.roles import Role
from moesched.steps.step import Step
from moesched.tasks import Task
from moesched.testing import CLOCKS, Case, check_policy, node_cases, policy_cases, run_on_symbols

SHIPPED = ["adversarial", *plugins.names("policies")]
ROOMY = {"t4": "GPU", "unified": "unified memory"}

# -- conformance -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "name"), [*enumerate(SHIPPED)], ids=str)
def test_every_shipped_policy_conforms(number: int, name: str) -> None:
    """Each runs in every case on the plain virtual clock, and in some of them on one of the other clocks in turn."""
    assert check_policy(lambda: make_policy(name), clocks=[PLAIN]) >= len(policy_cases()) // 2
    cases = node_cases() if name.startswith("ep_") else policy_cases()
    assert check_policy(lambda: make_policy(name), *in_turn(number, cases))


def test_six_policies_meet_each_case_on_each_clock() -> None:
    met = [
        (case.name, clock) for number in range(6) for case, clock in product(*in_turn(number, policy_cases()))
    ]
    assert sorted(met) == sorted((case.name, clock) for case in policy_cases() for clock in CLOCKS[1:])


def test_whatever_the_adversary_chooses_it_conforms() -> None:
    assert check_policy(lambda: make_policy("adversarial", {"seed": 1})) == len(policy_cases())


@pytest.mark.parametrize("name", SHIPPED)
def test_a_policy_that_was_made_anew_does_the_same_again(name: str) -> None:
    case = Case(name="again", machine=load_machine("t4"))

    def times() -> list[tuple[str, int, int]]:
        policy = make_policy(name)
        return [
            (task.label, task.start, task.end) for task in run_on_symbols(policy, case.plan(policy)).tasks
        ]

    assert times() == times()


class Forgetful:
    """Never fetches anything."""

    def plan(self, plan: Plan) -> None:
        plan.place_kv("accelerator")

    async def prefill(self, step: Step) -> None:
        for j in step.micro_batches:
            step.embed(j)
            for i in step.layers:
                step.pre_attention(i, j)

    async def decode(self, step: Step) -> None:
        raise NotImplementedError


class Greedy(Forgetful):
    """Wants more than there is."""

    def plan(self, plan: Plan) -> None:
        plan.place_kv("accelerator")
        plan.memory("accelerator").reserve("everything", 10**15)


class Sleepy(Forgetful):
    """Ends a step without having done anything."""

    async def prefill(self, step: Step) -> None:
        pass


@pytest.mark.parametrize(
    ("policy", "error", "says"),
    [
        (Forgetful, NotResident, "is not in gpu: fetch it before the kernel that reads it"),
        (Sleepy, OutOfOrder, "prefill step 0 ended before mb0 was sampled: it is at the start"),
        (Greedy, AssertionError, "fits in none of 16 cases; the first is roomy GPU: policy Greedy"),
    ],
)
def test_the_suite_finds(policy: type[Forgetful], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        check_policy(policy)


def test_a_plan_that_does_not_fit_says_what_to_do() -> None:
    layout = weight_layout(SHAPES["mixtral-8x7b"])
    with pytest.raises(
        BadInput, match=r"policy Resident does not fit: page .* bytes too few: raise --budget"
    ):
        plan_run(load_machine("t4"), layout, split_batch([8], 2, 1), make_policy("resident"))


@pytest.mark.parametrize("name", ["cgopipe", "expert_streaming", "layer_streaming"])
def test_a_slot_holds_every_page_that_streams_though_one_layer_has_larger_ones(name: str) -> None:
    layout = Case(name="uneven", machine=load_machine("t4"), layers=4).layout()
    policy = make_policy(name)
    plan = Plan(
        load_machine("t4"),
        layout,
        split_batch([4] * 4, 3, 2),
        {"gpu": 230_000},
        slot_bytes=lambda page: page.nbytes + 4096 * (page.layer == 2),
    )
    policy.plan(plan)
    largest = max(map(plan.slot_bytes, layout.pages))
    assert plan.weights.pools and all(pool.slot_bytes == largest for pool in plan.weights.pools)


# -- Algorithm 1 -----------------------------------------------------------------------------------


def algorithm_1(layers: int, micro_batches: int) -> Iterator[str]:
    """The order in which the paper's launcher submits a decode step (MoE-Lightning, Algorithm 1), counted from 0.

    Its look-ahead j + 2 goes on in the next layer when it passes the last micro-batch, and the weights of the layer
    behind the last one are those of the next step's first.
    """
    order = [(i, j) for i in range(layers) for j in range(micro_batches)]

    def ahead(i: int, j: int) -> Iterator[str]:
        yield f"pre_attention L{i} mb{j}"
        yield f"offload_qkv L{i} mb{j}"
        yield f"cpu_attention L{i} mb{j}"
        yield f"copy_to_pinned page {j} of L{(i + 1) % layers}"

    for i, j in order[:2]:
        yield from ahead(i, j)
    for k, (i, j) in enumerate(order):
        yield f"load_hidden L{i} mb{j}"
        yield f"fetch page {j} of L{(i + 1) % layers}"
        yield f"post_attention L{i} mb{j}"
        if k + 2 < len(order):
            yield from ahead(*order[k + 2])


def told(task: Task, first_page: int) -> str:
    """A task as `algorithm_1` names it: pages by their place among those of their layer that stream."""
    if task.verb in ("copy_to_pinned", "fetch"):
        (page,) = task.pages  # type: ignore[attr-defined]
        return f"{task.verb} page {page.id % 5 - first_page} of L{task.layer}"
    return task.label


def test_cgopipe_submits_in_the_order_of_algorithm_1() -> None:
    policy: Any = make_policy("cgopipe")
    machine = staged(load_machine("t4"), "16GB")
    case = Case(name="paper", machine=machine, layers=4, prompts=(2,) * 6, micro_batch_size=2, weights=0.6)
    plan = case.plan(policy)
    assert [len(pages) for pages in policy.streamed] == [3] * 4, "a page for each of the three micro-batches"
    tasks = run_on_symbols(policy, plan).tasks
    first_decode = [task for task in tasks if task.step == 1 and task.verb not in ("embed", "sample", "join")]
    assert [told(task, first_page=2) for task in first_decode] == list(algorithm_1(4, 3))


@pytest.mark.parametrize("name", ["cgopipe", "fastdecode", "three_tiers"])
def test_a_layer_of_pinned_memory_is_enough(name: str) -> None:
    layout = Case(name="little pinned", machine=load_machine("t4"), layers=4).layout()
    layer = sum(page.nbytes for page in layout.layer(0))
    largest = max(page.nbytes for page in layout.pages)
    policy, batch = make_policy(name), split_batch([4] * 6, 4, 2)
    budgets = {"gpu": 3 * layer + 40_000}
    roomy = plan_run(staged(load_machine("t4"), "1GB"), layout, batch, policy, budgets)
    staging = sum(pool.nbytes for pool in roomy.weights.pools if pool.memory is roomy.memory("pinned"))
    buffers = roomy.memory("pinned").used - staging
    machine = staged(load_machine("t4"), buffers + largest * len(layout.layer(0)))
    plan = plan_run(machine, layout, batch, policy, budgets)
    ended = run_on_symbols(policy, plan)
    assert ended.tokens == ended.expected
    assert any(task.verb == "copy_to_pinned" for task in ended.tasks)


def test_cgopipe_fetches_nothing_for_a_step_that_does_not_come() -> None:
    policy = make_policy("cgopipe")
    case = Case(name="last", machine=load_machine("t4"), layers=4, weights=0.6, new_tokens=3)
    tasks = run_on_symbols(policy, case.plan(policy)).tasks
    last = [task for task in tasks if task.step == 2]
    assert {task.layer for task in last if task.verb == "fetch"} == {1, 2, 3}


# -- keys and values --------------------------------------------------------------------------------


class Loads(Everything):
    """Says a number of `load_kv` at the start of the first decode step."""

    def __init__(self, role: Role, loads: Sequence[tuple[int, int]]) -> None:
        self.role = role
        self.loads = loads

    def plan(self, plan: Plan) -> None:
        plan.place_kv(self.role)
        plan.reserve_kv_buffers(2)
        plan.keep([page for i in plan.layers for page in plan.layout.layer(i)])

    def attend(self, step: Step, i: int, j: int) -> None:
        step.attention(i, j)
        if self.role == "host":
            step.offload_kv(i, j)

    async def decode(self, step: Step) -> None:
        for j in step.micro_batches:
            step.embed(j)
        for i, j in self.loads:
            step.load_kv(i, j)
        step.pre_attention(0, 0)
        step.offload_qkv(0, 0)
        step.cpu_attention(0, 0)


@pytest.mark.parametrize(
    ("role", "loads", "says"),
    [
        ("accelerator", [(0, 0)], "load_kv: the KV cache lives on the accelerator: omit it"),
        ("host", [(0, 0), (0, 1), (1, 0)], r"all 2 slots .* taken: call attention for one of them first"),
        ("host", [(0, 0)], "cpu_attention: L0 mb0 was loaded by load_kv: use attention"),
        ("host", [(3, 0)], "load_kv: the model has no L3: its layers are L0 to L2"),
    ],
)
@pytest.mark.parametrize("machine", ["t4", "unified"])
def test_keys_and_values_are_loaded_for_attention_that_follows(
    role: Role, loads: Sequence[tuple[int, int]], says: str, machine: str
) -> None:
    policy = Loads(role, loads)
    case = next(case for case in policy_cases() if case.name == "roomy " + ROOMY[machine])
    with pytest.raises(PolicyError, match=says):
        run_on_symbols(policy, case.plan(policy))


class LoadsLate(Loads):
    """Loads keys and values when the queries are on the host already."""

    async def decode(self, step: Step) -> None:
        step.embed(0)
        step.pre_attention(0, 0)
        step.offload_qkv(0, 0)
        step.load_kv(0, 0)


class SavesNothing(Loads):
    """Saves keys and values of a layer before they are there."""

    def __init__(self, layer: int) -> None:
        super().__init__("host", [])
        self.layer = layer

    async def prefill(self, step: Step) -> None:
        step.embed(0)
        step.offload_kv(self.layer, 0)


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (
            LoadsLate("host", []),
            r"load_kv\(L0, mb0\) needs mb0 at step 1 L0 qkv or earlier in the step, "
            "but it is at step 1 L0 qkv on the host",
        ),
        (
            SavesNothing(0),
            r"offload_kv\(L0, mb0\): mb0 has no keys and values to save in L0: call attention before; "
            "it is at step 0 L0 input",
        ),
        (SavesNothing(-1), "offload_kv: the model has no L-1: its layers are L0 to L2"),
    ],
    ids=["late load", "nothing to save", "no layer"],
)
def test_keys_and_values_move_at_their_time(policy: Loads, says: str) -> None:
    case = next(case for case in policy_cases() if case.name == "roomy GPU")
    with pytest.raises(OutOfOrder, match=says):
        run_on_symbols(policy, case.plan(policy))

"""Things that policies may not do: change what they see, call verbs outside of their turn."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from benchmarks.robustness._meddling import attributes, reachable
from meddling import CASE, CLOCKS, Everything, Meddling, Mistake, refused
from moesched.errors import PolicyError
from moesched.machines import load_machine
from moesched.models.layout import Page
from moesched.runs.policy_errors import policy_line
from moesched.steps.memory import Pool
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.tasks import DONE, Task
from moesched.testing import Case, run_on_symbols
from moesched.testing.policy_checks import Clock


def write_attribute(called: str, name: str, value: Any) -> Mistake:
    """A policy that assigns to an attribute of the step or of the plan."""
    return lambda step, plan: setattr({"step": step, "plan": plan}[called], name, value)


def raise_a_budget(step: Step, plan: Plan) -> None:
    plan.memory("accelerator").capacity *= 2


def make_a_kernel_free(step: Step, plan: Plan) -> None:
    plan.machine.processors["gpu"].flops["bfloat16"] = 1e30


MISTAKES: dict[str, tuple[Mistake, str]] = {
    "layers": (write_attribute("step", "layers", range(2)), "layers of a Step cannot be changed: loop over a part"),
    "micro-batches": (write_attribute("step", "micro_batches", [0]), "micro_batches of a Step cannot be changed"),
    "the last step": (write_attribute("step", "last", True), "last of a Step cannot be changed"),
    "no layers": (lambda step, plan: delattr(step, "layers"), "layers of a Step cannot be changed"),
    "a verb": (write_attribute("step", "attention", print), "attention of a Step cannot be changed"),
    "layers of the plan": (
        write_attribute("plan", "layers", range(2)),
        "layers of a Plan cannot be changed: declare with the plan's methods",
    ),
    "a budget": (raise_a_budget, "capacity of a Memory cannot be changed"),
    "no memories": (
        lambda step, plan: plan.memories.clear(),  # type: ignore[attr-defined]  # as a policy without types would
        r"read-only: copy it first, with dict\(\.\.\.\): .* no attribute 'clear'",
    ),
    "a free kernel": (make_a_kernel_free, "read-only: copy it first"),
    "the order of lanes": (write_attribute("plan", "discipline", "in_order"), "discipline: the plan is made"),
    "more that is kept": (
        lambda step, plan: plan.keep(plan.layout.pages[:1]),
        "keep: the plan is made and its memory reserved",
    ),
    "the end of the step": (
        lambda step, plan: step.close(),
        "close: a step is closed once prefill or decode has ended: return instead",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_policy_that_changes_what_it_sees_is_refused_at_its_own_line(name: str) -> None:
    mistake, says = MISTAKES[name]
    error = refused(Meddling(mistake))
    assert re.search(says, str(error))
    first = mistake.__code__.co_firstlineno
    assert policy_line(error) in [f"{__file__}:{number}" for number in (first, first + 1)]


def test_a_memory_that_does_not_exist_is_refused_with_those_that_do() -> None:
    class Keeps(Everything):
        def plan(self, plan: Plan) -> None:
            unknown: Any = "vram"
            plan.keep(plan.layout.pages, unknown)

    memories = "give 'accelerator' (gpu) or 'host' or 'pinned'"
    assert f"keep: 'vram' is no memory for that on machine t4: {memories}" in str(refused(Keeps()))


ASKED: list[tuple[Callable[[Step], object], str]] = [
    (lambda step: step.pages(99), "pages: the model has no L99: its layers are L0 to L2: loop over step.layers"),
    (lambda step: step.pages(-1), "pages: the model has no L-1"),
    (lambda step: step.dense_pages(3), "dense_pages: the model has no L3"),
    (lambda step: step.expert_pages(3, 0), "expert_pages: the model has no L3"),
    (lambda step: step.expert_pages(0, 4), "expert_pages: L0 has no E4: its experts are E0 to E3"),
    (lambda step: step.kv_on_accelerator(0, 3), "kv_on_accelerator: the model has no L3"),
    (lambda step: step.kv_on_accelerator(9), "kv_on_accelerator: there is no mb9 in this step: they are mb0 to mb1"),
    (lambda step: step.phase(9), "phase: there is no mb9"),
    (lambda step: step.tokens(9), "tokens: there is no mb9"),
    (lambda step: step.goes_on(9), "goes_on: there is no mb9"),
]  # fmt: skip


def test_a_question_about_what_does_not_exist_says_what_does() -> None:
    class Asks(Everything):
        async def prefill(self, step: Step) -> None:
            for ask, told in ASKED:
                with pytest.raises(PolicyError, match=re.escape(told)):
                    ask(step)
            raise PolicyError("asked all")

    assert str(refused(Asks())) == "asked all"


@pytest.mark.parametrize("clock", CLOCKS)
def test_the_chosen_experts_cannot_be_taken_out_while_they_run(clock: Clock) -> None:
    class TakesOut(Everything):
        async def run_experts(self, step: Step, i: int, j: int) -> None:
            routed: Any = await step.route(i, j)
            while routed:
                step.run_expert(i, routed.popitem()[0], j)

    assert "read-only: copy it first, with dict(...)" in str(refused(TakesOut(), clock))


def test_the_value_of_a_task_cannot_be_replaced() -> None:
    class Replaces(Everything):
        async def run_experts(self, step: Step, i: int, j: int) -> None:
            routing: Any = step.route(i, j)
            await routing
            routing.value = {}

    with pytest.raises(AttributeError, match="property 'value' of 'Decision' object has no setter"):
        run_on_symbols(policy := Replaces(), CASE.plan(policy))


def test_sampled_tokens_cannot_be_changed() -> None:
    class Improves(Everything):
        async def prefill(self, step: Step) -> None:
            for j in step.micro_batches:
                step.embed(j)
                for i in step.layers:
                    step.pre_attention(i, j)
                    step.attention(i, j)
                    step.post_attention(i, j)
                tokens: Any = await step.sample(j)
                tokens[0] = 7

        decode = prefill

    with pytest.raises(TypeError, match="'tuple' object does not support item assignment"):
        run_on_symbols(policy := Improves(), CASE.plan(policy))


def test_nothing_that_public_names_lead_to_can_be_changed() -> None:
    open_to_changes: list[str] = []
    seen: list[str] = []

    def look(step: Step, plan: Plan) -> None:
        for root, called in (
            (plan, "plan"),
            (step, "step"),
            (policy.pool, "pool"),
            (policy.resident, "kept"),
        ):
            for name, each in reachable(root, called):
                seen.append(name)
                if isinstance(each, (dict, list, set, deque)):
                    open_to_changes.append(f"{name} is a {type(each).__name__}")
                for key in attributes(each):
                    try:
                        setattr(each, key, getattr(each, key))
                    except (AttributeError, PolicyError, TypeError):
                        continue
                    open_to_changes.append(f"{name}.{key}")

    policy = Meddling(look)
    ended = run_on_symbols(policy, CASE.plan(policy))
    assert ended.tokens == ended.expected
    assert not open_to_changes
    assert {"plan.machine.links", "plan.weights.resident", "plan.reservations.sizes", "pool.memory"} <= {
        *seen
    }
    assert len(seen) > 100


# -- verbs outside of the policy's turn ------------------------------------------------------------


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_verb_called_from_another_thread_is_refused_there(clock: Clock) -> None:
    errors: list[Exception] = []

    class Delegates(Everything):
        async def decode(self, step: Step) -> None:
            def work() -> None:
                try:
                    step.embed(0)
                except PolicyError as error:
                    errors.append(error)

            helper = threading.Thread(target=work, name="helper")
            helper.start()
            helper.join()
            await self.prefill(step)

    policy = Delegates()
    ended = run_on_symbols(policy, CASE.plan(policy), clock)
    assert ended.tokens == ended.expected, "a refused call leaves no trace"
    assert len(errors) == CASE.new_tokens - 1
    assert str(errors[0]) == (
        "embed: called on thread helper, which does not run the policy of decode step 1: call verbs in prefill and "
        "decode themselves"
    )
    assert policy_line(errors[0]).startswith(f"{__file__}:")


class Remembers(Everything):
    """Keeps its first step, and calls a verb of it later."""

    kept: ClassVar[list[Step]] = []
    pools: ClassVar[list[Pool]] = []
    pages: ClassVar[list[Page]] = []

    def __init__(self, use: Callable[[Remembers, Step], object]) -> None:
        self.use = use

    async def prefill(self, step: Step) -> None:
        if not self.kept:
            self.kept.append(step)
            self.pools.append(self.pool)
            self.pages.append(step.pages(0)[0])
        await super().prefill(step)

    async def decode(self, step: Step) -> None:
        self.use(self, step)
        await super().decode(step)


@pytest.fixture
def remembered() -> Iterator[None]:
    lists: list[list[Any]] = [Remembers.kept, Remembers.pools, Remembers.pages]
    for each in lists:
        each.clear()
    yield
    for each in lists:
        each.clear()


USES: dict[str, Callable[[Remembers, Step], object]] = {
    "embed": lambda policy, step: policy.kept[0].embed(0),
    "evict": lambda policy, step: policy.kept[0].evict(step.pages(2)[-1:], policy.pool),
    "promote": lambda policy, step: policy.kept[0].promote(step.pages(2)[-1:], policy.pool),
    "cancel": lambda policy, step: policy.kept[0].cancel(step.pages(2)[-1:], policy.pool),
    "fetch": lambda policy, step: policy.kept[0].fetch(step.pages(2)[-1:], policy.pool),
    "offload_kv": lambda policy, step: policy.kept[0].offload_kv(0, 0),
}


@pytest.mark.usefixtures("remembered")
@pytest.mark.parametrize("verb", USES)
def test_a_verb_of_a_step_that_is_over_is_refused(verb: str) -> None:
    assert "prefill step 0 is over: use the step that this" in str(refused(Remembers(USES[verb])))


@pytest.mark.usefixtures("remembered")
def test_a_step_of_another_run_is_refused_while_its_policy_waits() -> None:
    others: list[Step] = []

    class Shares(Everything):
        expert_parallel = True

        def plan(self, plan: Plan) -> None:
            plan.place_kv("accelerator")
            plan.place_experts([range(4)] * 2)

        async def run_experts(self, step: Step, i: int, j: int) -> None:
            others.append(step)
            routed = await step.route(i, j)
            for other in others:
                if other.node != step.node:
                    other.sample(0)
            step.assign(i, j, dict.fromkeys(routed, 0))

    case = Case(name="two", machine=load_machine("t4"), nodes=2, prompts=(3,))
    nodes = [Shares(), Shares()]
    (plan, policy), peer = [(case.plan(each, number), each) for number, each in enumerate(nodes)]
    with pytest.raises(PolicyError, match="sample: the policy of prefill step 0 is not running, and this is"):
        run_on_symbols(policy, plan, peers=[peer])


@pytest.mark.usefixtures("remembered")
@pytest.mark.parametrize(
    ("use", "says"),
    [
        (
            lambda policy, step: step.fetch(step.pages(2)[-1:], policy.pools[0]),
            "fetch: pool last belongs to another run: use a pool that this run's plan made",
        ),
        (
            lambda policy, step: step.fetch(policy.pages, policy.pool),
            "fetch: page L0 dense #0 belongs to another model or layout: take pages from plan.layout",
        ),
    ],
)
def test_what_belongs_to_another_run_is_refused(use: Any, says: str) -> None:
    other = Case(name="other", machine=CASE.machine, layers=3, weights=1.2, experts=8)
    run_on_symbols(policy := Remembers(lambda policy, step: None), other.plan(policy))
    assert says in str(refused(Remembers(use)))


@pytest.mark.parametrize("clock", CLOCKS)
def test_an_ended_handle_of_an_earlier_run_cannot_be_awaited(clock: Clock) -> None:
    kept: list[Task] = []

    class Keeps(Everything):
        async def run_experts(self, step: Step, i: int, j: int) -> None:
            kept.append(step.route(i, j))
            for expert in await kept[-1]:
                step.run_expert(i, expert, j)
            await kept[0]

    run_on_symbols(policy := Keeps(), CASE.plan(policy), clock)
    assert kept[0].state == DONE
    assert "is no task of this run: await what its verbs return" in str(refused(Keeps(), clock))


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_task_that_was_never_submitted_cannot_be_awaited(clock: Clock) -> None:
    class Invents(Everything):
        async def decode(self, step: Step) -> None:
            done = step.embed(0)
            await Task(done.lane, done.work, "mine")

    assert "is no task of this run: await what its verbs return" in str(refused(Invents(), clock))

"""Verbs are refused outside the policy's turn: on other threads, after the step, and in another run."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, ClassVar

import pytest

from meddling import CASE, CLOCKS, Everything, refused
from moesched.errors import PolicyError
from moesched.machines import load_machine
from moesched.models.layout import Page
from moesched.runs.policy_errors import policy_line
from moesched.steps.memory import Pool
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.tasks import Task
from moesched.testing import Case, run_on_symbols
from moesched.testing.policy_checks import Clock


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

    def __init__(self, use: Callable[[Remembers, Step], Awaitable[object]]) -> None:
        self.use = use

    async def prefill(self, step: Step) -> None:
        if not self.kept:
            self.kept.append(step)
            self.pools.append(self.pool)
            self.pages.append(step.pages(0)[0])
        await super().prefill(step)

    async def decode(self, step: Step) -> None:
        await self.use(self, step)
        await super().decode(step)


@pytest.fixture
def remembered() -> Iterator[None]:
    lists: list[list[Any]] = [Remembers.kept, Remembers.pools, Remembers.pages]
    for each in lists:
        each.clear()
    yield
    for each in lists:
        each.clear()


async def old_embed(policy: Remembers, step: Step) -> None:
    policy.kept[0].embed(0)


async def old_evict(policy: Remembers, step: Step) -> None:
    policy.kept[0].evict(step.pages(2)[-1:], policy.pool)


async def old_promote(policy: Remembers, step: Step) -> None:
    policy.kept[0].promote(step.pages(2)[-1:], policy.pool)


async def old_cancel(policy: Remembers, step: Step) -> None:
    policy.kept[0].cancel(step.pages(2)[-1:], policy.pool)


async def old_fetch(policy: Remembers, step: Step) -> None:
    policy.kept[0].fetch(step.pages(2)[-1:], policy.pool)


async def old_offload(policy: Remembers, step: Step) -> None:
    policy.kept[0].offload_kv(0, 0)


@pytest.mark.usefixtures("remembered")
@pytest.mark.parametrize("use", [old_embed, old_evict, old_promote, old_cancel, old_fetch, old_offload])
def test_a_verb_of_a_step_that_is_over_is_refused(use: Any) -> None:
    assert "prefill step 0 is over: use the step that this" in str(refused(Remembers(use)))


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


async def foreign_pool(policy: Remembers, step: Step) -> None:
    step.fetch(step.pages(2)[-1:], policy.pools[0])


async def foreign_page(policy: Remembers, step: Step) -> None:
    step.fetch(policy.pages, policy.pool)


@pytest.mark.usefixtures("remembered")
@pytest.mark.parametrize(
    ("use", "says"),
    [
        (foreign_pool, "fetch: pool last belongs to another run: use a pool that this run's plan made"),
        (
            foreign_page,
            "fetch: page L0 dense #0 belongs to another model or layout: take pages from plan.layout",
        ),
    ],
)
def test_what_belongs_to_another_run_is_refused(use: Any, says: str) -> None:
    async def nothing(policy: Remembers, step: Step) -> None:
        """The first run is as it should be."""

    other = Case(name="other", machine=CASE.machine, layers=3, weights=1.2, experts=8)
    run_on_symbols(policy := Remembers(nothing), other.plan(policy))
    assert says in str(refused(Remembers(use)))


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_task_that_was_never_submitted_cannot_be_awaited(clock: Clock) -> None:
    class Invents(Everything):
        async def decode(self, step: Step) -> None:
            done = step.embed(0)
            await Task(done.lane, done.work, "mine")

    assert "is no task of this run: await what its verbs return" in str(refused(Invents(), clock))


def test_a_method_that_is_not_async_is_refused() -> None:
    class Plain(Everything):
        def decode(self, step: Step) -> Any:
            """It forgot `async`."""

    with pytest.raises(PolicyError, match=r"decode of Plain gave None, no coroutine: define it `async def`"):
        run_on_symbols(policy := Plain(), CASE.plan(policy))

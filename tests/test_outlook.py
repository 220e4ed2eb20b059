"""Questions about time: pages that have arrived, and the expected ends of tasks and lanes."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meddling import CASE, CLOCKS, Everything, Meddling, Mistake, refused
from moesched.dispatch import LayerByLayer, keep_dense, leave_on_host, place_kv_that_fits, users_of
from moesched.dispatch.expert_placement import Routed
from moesched.drivers.capture import NotFixed
from moesched.drivers.virtual import VirtualDriver
from moesched.engine import Engine
from moesched.errors import BadInput, TaskCancelled
from moesched.models.layout import weight_layout
from moesched.models.tensor_parallel import cut_config
from moesched.policies.layer_streaming import LayerStreaming
from moesched.requests.batch import split_batch
from moesched.runs.simulation import simulate
from moesched.steps.expected_ends import expected_ends
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.tasks import DONE, Block, Kernel, Lane, Task
from moesched.testing import check_policy, run_on_symbols
from moesched.testing.policy_checks import Clock
from moesched.work import Work
from runs import make_plan

OTHER = msgspec.structs.replace(CASE.layout().pages[0], nbytes=1)


class Asking(Everything):
    """Streams all experts of a layer, some of them urgently, and asks about all that it has submitted so far.

    Keeps the expected and the real nanoseconds from the moment of the question to each end.
    """

    def __init__(self, seed: int = 0, discipline: Literal["in_order", "ready_first"] = "ready_first") -> None:
        self.random = Random(seed)
        self.discipline = discipline
        self.expected: list[int] = []
        self.real: list[int] = []
        self.idle: list[bool] = []

    def plan(self, plan: Plan) -> None:
        plan.request_times()
        plan.place_kv("host")
        plan.discipline = self.discipline
        plan.keep([page for i in plan.layers for page in plan.layout.dense(i)])
        experts = [page for page in plan.layout.pages if page.expert >= 0]
        slots = plan.layout.config.routed.experts * len(plan.layout.expert(0, 0))
        self.pool = plan.pool("accelerator", "experts", slots, experts)

    async def prefill(self, step: Step) -> None:
        for j in step.micro_batches:
            await step.embed(j)
        for i in step.layers:
            handles = [task for j in step.micro_batches for task in self.first_half(step, i, j)]
            routed = {j: await step.route(i, j) for j in step.micro_batches}
            handles += self.fetches(step, i)
            for j, chosen in routed.items():
                handles += [step.run_expert(i, expert, j) for expert in chosen]
                handles.append(step.combine(i, j))
            asked = await self.ask(step, handles)
            assert step.seconds_until(asked) == 0.0
        for j in step.micro_batches:
            step.sample(j)

    decode = prefill

    def first_half(self, step: Step, i: int, j: int) -> list[Task]:
        handles = [step.pre_attention(i, j)]
        if step.kind == "prefill":
            return [*handles, step.attention(i, j), step.offload_kv(i, j)]
        return [*handles, step.offload_qkv(i, j), step.cpu_attention(i, j), step.load_hidden(i, j)]

    def fetches(self, step: Step, i: int) -> list[Task]:
        experts = [step.expert_pages(i, expert) for expert in range(4)]
        self.random.shuffle(experts)
        return [
            step.fetch(
                pages, self.pool, urgent=self.random.random() < 0.3, speculative=self.random.random() < 0.5
            )
            for pages in experts
            if pages[0] not in self.pool
        ]

    async def ask(self, step: Step, handles: list[Task]) -> Task:
        """Compare expected ends with real ones; the first to end is the zero of both."""
        expected = [step.seconds_until(handle) for handle in handles]
        busy = step.seconds_until_idle("accelerator")
        for handle in handles:
            await handle
        left = [(ahead, handle) for ahead, handle in zip(expected, handles, strict=True) if ahead]
        assert busy == max(ahead for ahead, handle in left if handle.lane.name == "accelerator")
        assert step.seconds_until_idle("accelerator") == 0.0
        first, zero = min(left, key=lambda each: each[0])
        self.expected += [round((ahead - first) * 1e9) for ahead, _ in left]
        self.real += [handle.end - zero.end for _, handle in left]
        return handles[-1]


class Timed(Everything):
    """May ask for the time."""

    def plan(self, plan: Plan) -> None:
        super().plan(plan)
        plan.request_times()


class MeddlingWithTime(Timed, Meddling):
    """Makes a mistake about time."""


@pytest.mark.parametrize("discipline", ["ready_first", "in_order"])
@pytest.mark.parametrize("seed", range(4))
def test_on_the_virtual_clock_expected_ends_are_the_real_ones(
    seed: int, discipline: Literal["in_order", "ready_first"]
) -> None:
    policy = Asking(seed, discipline)
    run_on_symbols(policy, CASE.plan(policy))
    assert len(policy.expected) > 50
    assert policy.expected == policy.real


WORKS = [Work(f"of {nanoseconds} ns", "gpu", nanoseconds=nanoseconds) for nanoseconds in (1, 2, 3)]


@given(st.randoms(use_true_random=False))
def test_expected_ends_are_the_real_ones_whatever_is_joined_cancelled_and_promoted(draw: Random) -> None:
    lanes = [Lane(name, draw.choice(("in_order", "ready_first"))) for name in ("gpu", "link", "host")]
    engine = Engine(lanes)
    cost: Any = None  # the works have their times
    driver = VirtualDriver([engine], cost)
    blocks = [Block(name) for name in "abcde"]
    tasks: list[Task] = []
    expected: dict[int, int] = {}

    def submit() -> None:
        reads, writes = draw.sample(blocks, draw.randrange(3)), draw.sample(blocks, draw.randrange(3))
        if draw.random() < 0.2:
            engine.join(reads, writes)
            return
        task = Kernel(draw.choice(lanes), draw.choice(WORKS), "task")
        tasks.append(engine.submit(task, reads, writes, (), draw.randrange(-1, 3)))
        if draw.random() < 0.2:
            engine.cancel(draw.choice(tasks))
        if draw.random() < 0.2:
            engine.promote(draw.choice(tasks), 0)

    async def policy() -> None:
        for _ in range(4):
            for _ in range(draw.randrange(9)):
                submit()
            if tasks:
                with suppress(TaskCancelled):
                    await draw.choice(tasks)
        expected.update(expected_ends(lanes, tasks, driver.now, lambda work: work.nanoseconds).tasks)

    driver.run(policy())
    ran = [task for task in tasks if task.id in expected and task.state == DONE]
    assert [expected[task.id] for task in ran] == [task.end for task in ran]


class Watching(Everything):
    """Asks before and after the fetch of a page whether it has arrived, and keeps the answers."""

    def __init__(self) -> None:
        self.seen: list[list[bool]] = []

    def plan(self, plan: Plan) -> None:
        super().plan(plan)
        plan.request_times()
        self.page = self.pool.pages()[0] if self.pool.pages() else plan.layout.pages[-1]

    async def decode(self, step: Step) -> None:
        before = step.arrived(self.page)
        step.evict([self.page], self.pool)
        evicted = step.arrived(self.page)
        fetch = step.fetch([self.page], self.pool)
        coming = step.arrived(self.page)
        await fetch
        self.seen.append([before, evicted, coming, step.arrived(self.page)])
        await self.prefill(step)


@pytest.mark.parametrize("clock", CLOCKS)
def test_a_page_has_arrived_once_its_fetch_has_ended(clock: Clock) -> None:
    policy = Watching()
    run_on_symbols(policy, CASE.plan(policy), clock)
    coming = policy.seen[0][2] if clock == "real" else False
    assert policy.seen[0] == [True, False, coming, True]


def test_kept_pages_are_there_from_the_first_step_on() -> None:
    class Kept(Timed):
        async def prefill(self, step: Step) -> None:
            answers.append([step.arrived(page) for page in step.pages(0)])
            answers.append([step.arrived(page, "host") for page in step.pages(0)])
            await super().prefill(step)

    answers: list[list[bool]] = []
    run_on_symbols(policy := Kept(), CASE.plan(policy))
    assert all(answers[0])
    assert not any(answers[1])


def waits_by_asking(step: Step, plan: Plan) -> object:
    pool, [page] = plan.weights.pools[0], plan.weights.pools[0].pages()
    step.evict([page], pool)
    step.fetch([page], pool)
    while not step.arrived(page):
        pass
    return None


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (lambda step, plan: step.arrived(OTHER), "arrived: page L0 dense #0 belongs to another model"),
        (lambda step, plan: step.arrived(3), "arrived: 3 is no page"),
        (lambda step, plan: step.seconds_until(3), "seconds_until: 3 is no handle: give what a verb returned"),
        (
            lambda step, plan: step.seconds_until_idle("gpu"),
            "seconds_until_idle: there is no lane 'gpu': give one of 'accelerator', 'host', 'to host'",
        ),
        (
            lambda step, plan: step.seconds_until_idle("host", 99),
            "seconds_until_idle: the model has no L99: its layers are L0 to L",
        ),
        (waits_by_asking, "times in one step: time passes only while the policy awaits a handle"),
    ],
)  # fmt: skip
def test_questions_without_an_answer_are_refused_at_their_line(mistake: Mistake, told: str) -> None:
    assert told in str(refused(MeddlingWithTime(mistake)))


def test_after_the_step_no_question_is_answered() -> None:
    class Late(Timed):
        earlier: Step

        async def decode(self, step: Step) -> None:
            if step.index == 2:
                self.earlier.arrived(step.pages(0)[0])
            self.earlier = step
            await self.prefill(step)

    assert "decode step 1 is over" in str(refused(Late()))


def test_times_are_requested_first() -> None:
    told = str(refused(Meddling(lambda step, plan: step.arrived(step.pages(0)[0]))))
    assert "arrived: the plan requests no times: call plan.request_times() in Policy.plan" in told


@pytest.mark.parametrize("several", [{"nodes": 2}, {"layout": weight_layout(cut_config(CASE.config(), 2))}])
def test_several_ranks_or_nodes_must_not_decide_by_their_own_clocks(several: dict[str, Any]) -> None:
    whole = CASE.layout()
    plan = Plan(CASE.machine, **{"layout": whole, "batch": split_batch([3], 2, 1), **several})
    with pytest.raises(
        BadInput, match="the clocks of several ranks or nodes differ: use --tensor-parallel 1"
    ):
        plan.request_times()


def test_a_policy_that_looks_at_the_time_is_not_replayed() -> None:
    class Looks(LayerStreaming):
        def plan(self, plan: Plan) -> None:
            super().plan(plan)
            plan.request_times()

        async def decode(self, step: Step) -> None:
            step.seconds_until_idle("fetch")
            await super().decode(step)

    policy = Looks()
    with pytest.raises(NotFixed):
        simulate(make_plan(policy), policy, replay=True)


class HostUntilItArrives(LayerByLayer):
    """Runs an expert on the accelerator if it has arrived there, else on the host, and fetches what is not there."""

    def plan(self, plan: Plan) -> None:
        plan.request_times()
        place_kv_that_fits(plan, experts=2)
        plan.run_experts_on_host()
        keep_dense(plan)
        self.source = leave_on_host(plan)
        experts = [page for page in plan.layout.pages if page.expert >= 0]
        self.pool = plan.pool("accelerator", "experts", 2 * len(plan.layout.expert(0, 0)), experts)

    def run_experts(self, step: Step, i: int, routed: Routed) -> None:
        users = users_of(routed)
        here = [e for e in users if all(map(step.arrived, step.expert_pages(i, e)))]
        for expert in here:
            self.run_expert(step, i, expert, users[expert])
        away = sorted(users.keys() - here)
        for j in self.run_on_host(step, i, away, users):
            step.load_routed(i, j)
        coming = [e for e in away if step.expert_pages(i, e)[0] not in self.pool]
        if coming and step.seconds_until_idle("fetch") < 1.0:
            step.fetch(step.expert_pages(i, coming[0]), self.pool, source=self.source)


def test_deciding_by_what_has_arrived_changes_no_token() -> None:
    check_policy(HostUntilItArrives)

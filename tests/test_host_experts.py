"""Experts on the host: rows go there, weights never move, outputs come back, and the tokens are the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from benchmarks.robustness._damage import Damage, Damaged, Kind, end_of
from benchmarks.shared.small_runs import TWO_MEMORIES
from meddling import Everything
from moesched.devices.emulated.rehearsal import rehearse
from moesched.devices.torch.device import TorchDevice
from moesched.errors import NotResident, PolicyError
from moesched.machines import Machine, load_machine
from moesched.machines.roofline import Roofline
from moesched.models.checkpoint import Checkpoint
from moesched.models.host_buffers import routed_rows_bytes
from moesched.models.layout import Page, weight_layout
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.seams import ignore_progress
from moesched.steps.memory import Pool
from moesched.steps.plan import Plan
from moesched.steps.step import Step
from moesched.tasks import HostKernel, PageTransfer, Task
from moesched.testing import CLOCKS, Case, Clock, policy_cases, run_on_symbols
from odd_models import DBRX, MIXTRAL, stored

T4 = load_machine("t4")
CASES = {case.name: case for case in policy_cases()}


VISITORS = 2
"""Number of experts that the accelerator has room for beside those that stay."""


class EverySecond(Everything):
    """All that every token needs stays on the accelerator, the experts on the host; every second one runs there."""

    def __init__(self, early: bool = True) -> None:
        self.early = early

    def plan(self, plan: Plan) -> None:
        plan.place_kv("accelerator")
        plan.run_experts_on_host()
        plan.keep([page for i in plan.layers for page in plan.layout.dense(i)])
        experts = [page for page in plan.layout.pages if page.expert >= 0]
        self.device_kv = plan.machine.unified
        if self.device_kv or not plan.machine.weights_on_host:
            plan.keep(experts, "host")
        self.slots = None if self.device_kv else visitors(plan, experts)

    async def feed_forward(self, step: Step, i: int, j: int) -> None:
        routing = step.route(i, j)
        if self.early:
            step.offload_routed(i, j)
        routed = await routing
        if not self.early:
            step.offload_routed(i, j)
        for expert in routed:
            if expert % 2:
                step.run_expert(i, expert, j, at="host")
            else:
                self._visit(step, i, expert, j)
        if any(expert % 2 for expert in routed):
            step.load_routed(i, j)
        step.combine(i, j)

    def _visit(self, step: Step, i: int, expert: int, j: int) -> None:
        if self.slots is not None:
            step.fetch(step.expert_pages(i, expert), self.slots)
        step.run_expert(i, expert, j)
        if self.slots is not None:
            step.evict(step.expert_pages(i, expert), self.slots)


# -- on symbols ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize(
    "name", ["roomy GPU", "roomy unified memory", "weights on the disk", "dense model", "tight GPUs"]
)
def test_the_tokens_are_the_models(name: str, clock: Clock) -> None:
    policy = EverySecond()
    case = msgspec.structs.replace(CASES[name], weights=1.2, pages_per_expert=2)
    ended = run_on_symbols(policy, case.plan(policy), clock)
    assert ended.tokens == ended.expected


def steps_of(machine: Machine, early: bool = True) -> list[Task]:
    policy = EverySecond(early)
    ended = run_on_symbols(policy, Case(name="watched", machine=machine).plan(policy))
    return [task for task in ended.tasks if task.step >= 0]


@pytest.mark.parametrize("early", [True, False])
def test_rows_go_once_and_outputs_come_back_once_for_each_layer_and_micro_batch(early: bool) -> None:
    tasks = steps_of(T4, early)
    for verb, lane in (("offload_routed", "gpu->host"), ("load_routed", "host->gpu")):
        moved = Counter((task.step, task.layer, task.micro_batch) for task in tasks if task.verb == verb)
        assert moved and set(moved.values()) == {1}
        assert {task.lane.name for task in tasks if task.verb == verb} == {lane}
    there = [task for task in tasks if task.verb == "run_expert" and isinstance(task, HostKernel)]
    assert {task.expert % 2 for task in there} == {1}
    assert {task.lane.name for task in there} == {"host"}
    fetched = {task.expert for task in tasks if isinstance(task, PageTransfer) and task.verb == "fetch"}
    assert fetched == {0, 2}, "weights of experts on the host are never moved"
    ends = [max(task.end for task in steps_of(T4, early)) for early in (True, False)]
    assert ends[0] <= ends[1], "rows leave while the policy waits for the router"


def test_what_is_moved_are_the_rows_and_a_host_expert_costs_the_hosts_time() -> None:
    tasks = steps_of(T4)
    hidden = Case(name="watched", machine=T4).config().hidden * 2
    cost = Roofline(T4, "bfloat16")
    for task in tasks:
        if task.verb == "offload_routed" and task.step > 0:
            assert task.work.nbytes == 2 * hidden, "two sequences, each once"
        if task.verb == "run_expert":
            assert task.work.resource == ("cpu" if isinstance(task, HostKernel) else "gpu")
            assert task.end - task.start == round(cost.work(task.work).seconds * 1e9)
    there = [task for task in tasks if isinstance(task, HostKernel)]
    loaded = [task for task in tasks if task.verb == "load_routed"]
    assert sum(task.work.nbytes for task in loaded) == hidden * sum(task.work.tokens for task in there)


def test_on_one_memory_nothing_moves() -> None:
    tasks = steps_of(CASES["roomy unified memory"].machine)
    assert any(isinstance(task, HostKernel) for task in tasks)
    assert not any(isinstance(task, PageTransfer) for task in tasks)


def test_the_plan_makes_room_for_the_rows() -> None:
    batch = split_batch([30, 20, 10, 5], 3, 2)
    layout = Case(name="room", machine=T4).layout()
    without, planned = Plan(T4, layout, batch), Plan(T4, layout, batch)
    for plan in (without, planned):
        plan.limit_in_flight(1)
        plan.place_kv("accelerator")
    planned.run_experts_on_host()
    assert planned.free("accelerator") == without.free("accelerator") - 50 * planned.operations.hidden_bytes
    taken = without.free("host") - planned.free("host")
    assert taken > routed_rows_bytes(planned.operations, 50), "rows and workspace"


# -- what is refused -----------------------------------------------------------------------------------------------

REFUSED: list[tuple[Kind, str, str]] = [
    ("drop", "offload_routed", r"run_expert: L0 mb0 is not on the host: call offload_routed before"),
    ("repeat", "offload_routed", r"the rows of L0 mb0 are on the host already"),
    ("mistake", "offload_routed", r"offload_routed\(L1, mb0\) needs mb0 at step 0 L1 routed"),
    ("exchange", "offload_routed", r"offload_routed\(L0, mb1\) needs mb1 at"),
    ("drop", "load_routed", r"combine: L0 mb0 lacks the outputs of E1.* on the host: call load_routed first"),
    ("repeat", "load_routed", r"no expert of L0 mb0 has run on the host"),
    ("swap", "load_routed", r"combine: L0 mb0 lacks the outputs of E1.* on the host"),
    ("drop", "run_expert", r"combine: .* was routed to E[0-9], which did not run"),
]


def right(policy: Damaged, plan: Plan) -> bool:
    ended = run_on_symbols(policy, plan)
    return ended.tokens == ended.expected


@pytest.mark.parametrize("machine", ["roomy GPU", "roomy unified memory"])
@pytest.mark.parametrize(("kind", "verb", "says"), REFUSED, ids=[f"{k} {v}" for k, v, _ in REFUSED])
def test_a_damaged_schedule_is_refused_at_its_own_line(
    kind: Kind, verb: str, says: str, machine: str
) -> None:
    counter = Damaged(EverySecond(early=False), Damage("drop", -1))
    run_on_symbols(counter, CASES[machine].plan(counter))
    damaged = Damaged(EverySecond(early=False), Damage(kind, counter.calls.index(verb)))
    plan = CASES[machine].plan(damaged)
    end = end_of(damaged, lambda: right(damaged, plan))
    assert end.how == "raised"
    assert re.search(says, end.what), end.what


def visitors(plan: Plan, experts: Sequence[Page]) -> Pool:
    """A pool of the accelerator with room for some experts."""
    return plan.pool("accelerator", "visitors", VISITORS * len(plan.layout.an_expert), experts)


class Misplanned(EverySecond):
    """Forgets to say so in its plan, or keeps all experts on the accelerator all the same."""

    def __init__(self, *, declared: bool) -> None:
        super().__init__()
        self.says_so = declared

    def plan(self, plan: Plan) -> None:
        experts = [page for page in plan.layout.pages if page.expert >= 0]
        if self.says_so:
            super().plan(plan)
            plan.keep(experts)
            self.slots = None
        else:
            plan.place_kv("accelerator")
            plan.keep([page for i in plan.layers for page in plan.layout.dense(i)])
            self.slots = visitors(plan, experts)


@pytest.mark.parametrize(
    ("declared", "error", "says"),
    [
        (False, PolicyError, "the plan has no room for experts on the host: call plan.run_experts_on_host"),
        (True, NotResident, r"page L0 E1 #0 is not in host"),
    ],
)
def test_the_host_runs_no_expert_that_the_plan_did_not_leave_it(
    declared: bool, error: type[Exception], says: str
) -> None:
    policy = Misplanned(declared=declared)
    with pytest.raises(error, match=says):
        run_on_symbols(policy, Case(name="refused", machine=T4, weights=3.0).plan(policy))


# -- on tensors ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[MIXTRAL, DBRX], ids=lambda config: config.name)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return stored(request.param, tmp_path_factory.mktemp("models"))


def test_a_rehearsal_sees_experts_on_the_host(checkpoint: Checkpoint) -> None:
    device = TorchDevice(checkpoint, weight_layout(checkpoint.config, "float32"))
    plan = plan_run(TWO_MEMORIES, device.layout, split_batch([4] * 4, 3, 2), EverySecond())
    rehearsed = rehearse(checkpoint, device.layout, plan, Roofline(TWO_MEMORIES, "float32"), ignore_progress)
    for kind in ("prefill", "decode"):
        seen = {(each.lane, each.verb) for each in rehearsed[kind]}
        assert seen >= {("gpu->host", "offload_routed"), ("host", "run_expert"), ("host->gpu", "load_routed")}

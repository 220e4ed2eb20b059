"""Pipeline parallelism: stages with lanes and memories of their own, and why FlexGen gains little from more GPUs."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from meddling import Everything
from moesched.errors import BadInput, PolicyError
from moesched.machines import AcceleratorGroup, Interconnect, Machine, load_machine
from moesched.machines.group import written_out
from moesched.machines.roofline import Roofline
from moesched.machines.staging import staged
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.planner.search_policies import plan_best
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs import hardware
from moesched.runs.outcome import Report
from moesched.runs.planning import make_lanes, plan_run
from moesched.runs.simulation import simulate
from moesched.steps.plan import Plan, stage_of
from moesched.steps.roles import Role
from moesched.steps.step import Step
from moesched.tasks import Task
from moesched.testing import CLOCKS, Case, Clock, run_on_symbols
from moesched.testing.symbolic.device import SymbolicDevice
from moesched.work import Work
from runs import Ended

WIRES = Interconnect(bandwidth=12e9, latency=20e-6)
ONE = load_machine("t4")
TWO, FOUR = (
    replace(load_machine(f"t4x{n}"), accelerator_group=AcceleratorGroup(count=n, interconnect=WIRES))
    for n in (2, 4)
)
SMALL = weight_layout(SHAPES["mixtral-0.8b"])
APART = load_machine("t4x2")
"""Joined by the links to the host."""


def case(machine: Machine, *, layers: int = 7, micro_batches: int = 5, weights: float = 0.5) -> Case:
    return Case(
        name="pipeline",
        machine=machine,
        layers=layers,
        prompts=(2,) * micro_batches,
        micro_batch_size=1,
        weights=weights,
        new_tokens=4,
    )


# -- what a plan cuts ------------------------------------------------------------------------------


def test_a_pipeline_gives_each_accelerator_a_range_of_layers_a_memory_and_lanes() -> None:
    plan = case(FOUR).plan(make_policy("flexgen_pipeline"))
    assert plan.stages == (range(2), range(2, 4), range(4, 6), range(6, 7))
    assert [stage_of(plan.stages, layer) for layer in plan.layers] == [0, 0, 1, 1, 2, 2, 3]
    assert [memory.name for memory in plan.accelerators] == ["gpu", "gpu 1", "gpu 2", "gpu 3"]
    assert {memory.capacity for memory in plan.accelerators} == {plan.memories["gpu"].capacity}
    lanes = make_lanes(plan).keys()
    assert {"accelerator", "accelerator 3", "host->gpu", "host->gpu 3", "gpu 3->host"} < lanes
    assert {"gpu->gpu 1", "gpu 1->gpu 2", "gpu 2->gpu 3"} < lanes


def test_there_are_no_more_stages_than_layers() -> None:
    plan = case(FOUR, layers=3, weights=1.2).plan(make_policy("flexgen_pipeline"))
    assert plan.stages == (range(1), range(1, 2), range(2, 3))


def test_the_links_of_the_first_accelerator_are_written_out_for_the_others() -> None:
    machine = written_out(staged(TWO, "16GB"), 2)
    cost = Roofline(machine, "bfloat16")
    first, second, across = (
        cost.work(Work("copy", link, nbytes=1e9)) for link in ("pinned->gpu", "pinned->gpu 1", "gpu->gpu 1")
    )
    assert first.seconds == second.seconds
    assert dict(first.shares).keys() == {"host->gpu", "host", "gpu"}, (
        "its path, and the memories at its ends: pinned memory is the host's"
    )
    assert dict(second.shares).keys() == {"host->gpu 1", "host", "gpu 1"}
    assert across.seconds == pytest.approx(1e9 / WIRES.bandwidth, rel=1e-3)
    assert written_out(ONE, 1).memories == ONE.memories


def test_one_pool_for_pages_of_two_stages_is_refused() -> None:
    plan = Plan(TWO, case(TWO).layout(), split_batch([2] * 4, 3, 1), pipelined=True)
    with pytest.raises(
        PolicyError, match=r"pages of stages \[0, 1\] together: keep and pool each stage's by itself"
    ):
        plan.pool("accelerator", "all", 2, plan.layout.pages)


def test_no_device_runs_a_pipeline() -> None:
    policy = make_policy("flexgen_pipeline")
    plan = case(TWO).plan(policy)
    with pytest.raises(
        BadInput, match=r"FlexGenPipeline makes a pipeline of 2 accelerators, and devices run one"
    ):
        hardware.run(plan, policy, SymbolicDevice(), [])


# -- values ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("machine", [TWO, FOUR, APART], ids=["two", "four", "two apart"])
def test_a_pipeline_ends_with_the_models_tokens(machine: Machine, clock: Clock) -> None:
    policy = make_policy("flexgen_pipeline")
    plan = case(machine, weights=0.4).plan(policy)
    ended = run_on_symbols(policy, plan, clock)
    assert ended.tokens == ended.expected
    assert all(0 < memory.peak <= memory.capacity for memory in plan.accelerators)
    passed = Counter(task.lane.name for task in ended.tasks if task.verb == "pass_hidden")
    micro_batches, steps = 5, 4
    ways = {"two apart": ["gpu->host", "host->gpu 1"], "t4x2": ["gpu->gpu 1"]}
    ways["t4x4"] = ["gpu->gpu 1", "gpu 1->gpu 2", "gpu 2->gpu 3"]
    expected = ways["two apart" if machine is APART else machine.name]
    assert passed == dict.fromkeys(expected, micro_batches * steps)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_a_batch_of_fewer_micro_batches_than_stages_goes_through_as_well(micro_batches: int) -> None:
    policy = make_policy("flexgen_pipeline")
    ended = run_on_symbols(policy, case(FOUR, micro_batches=micro_batches).plan(policy))
    assert ended.tokens == ended.expected


class AllVerbs(Everything):
    """A pipeline that keeps all weights, runs expert by expert, and attends where the cache is."""

    pipelines = True

    def __init__(self, kv: Role) -> None:
        self.kv = kv

    def plan(self, plan: Plan) -> None:
        plan.place_kv(self.kv)
        for layers in plan.stages:
            plan.keep([page for i in layers for page in plan.layout.layer(i)])

    def attend(self, step: Step, i: int, j: int) -> None:
        if self.kv == "host" and step.kind == "decode":
            step.offload_qkv(i, j)
            step.cpu_attention(i, j)
            step.load_hidden(i, j)
        else:
            step.attention(i, j)
            if self.kv == "host":
                step.offload_kv(i, j)


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("kv", ["accelerator", "host"])
def test_every_verb_of_a_layer_runs_at_the_layers_stage(kv: Role, clock: Clock) -> None:
    policy = AllVerbs(kv)
    ended = run_on_symbols(policy, case(TWO, weights=1.2).plan(policy), clock)
    assert ended.tokens == ended.expected
    for task in ended.tasks:
        second = stage_of(ended.plan.stages, max(task.layer, 0)) == 1 or task.verb == "sample"
        if task.lane.name not in ("host", "gpu->gpu 1", "join") and task.step >= 0:
            assert task.lane.name.replace("->host", "").endswith(" 1") == second, f"{task!r}"


def test_on_one_accelerator_it_is_flexgen() -> None:
    submitted = []
    for name in ("flexgen", "flexgen_pipeline"):
        policy = make_policy(name)
        ended = run_on_symbols(policy, case(ONE, weights=0.4).plan(policy))
        submitted.append([(task.label, task.lane.name, task.start, task.end) for task in ended.tasks])
    assert submitted[0] == submitted[1]


# -- why it does not scale -------------------------------------------------------------------------

LAYOUT = weight_layout(SHAPES["mixtral-8x22b"], page_bytes=1 << 30)


class Scaled:
    """FlexGen's pipeline for Mixtral 8x22B, with the same batch and the same host memory on any machine."""

    def __init__(self, machine: Machine) -> None:
        policy = make_policy("flexgen_pipeline")
        watch = Ended()
        self.plan = plan_run(machine, LAYOUT, split_batch([77] * 256, 4, 64), policy)
        self.report: Report = simulate(self.plan, policy, observers=[watch])
        self.tasks = [task for task in watch.tasks if task.step >= 0 and task.verb != "join"]
        kept = {page.id for fixed in self.plan.weights.resident for page in fixed.pages()}
        self.streamed = [
            sum(page.nbytes for page in LAYOUT.layer(i) if page.id not in kept) for i in self.plan.layers
        ]

    def links(self) -> dict[str, list[Task]]:
        """The second decode step's transfers of weights, by lane."""
        lanes: dict[str, list[Task]] = {}
        for task in self.tasks:
            if task.verb == "fetch" and task.step == 2:
                lanes.setdefault(task.lane.name, []).append(task)
        return lanes

    def all_active(self) -> float:
        """The share of the second decode step in which every stage computes or fetches."""
        end = sum(self.report.step_seconds[:3]) * 1e9 + self.report.load_seconds * 1e9
        start = end - self.report.step_seconds[2] * 1e9
        changes: list[tuple[int, int, int]] = []
        for task in self.tasks:
            if task.verb in ("fetch", "load_kv", "pre_attention", "attention", "post_attention"):
                stage = stage_of(self.plan.stages, task.layer)
                changes += [(task.start, 1, stage), (task.end, -1, stage)]
        running = [0] * len(self.plan.stages)
        active, last = 0.0, start
        for now, change, stage in sorted(changes):
            if all(running) and now > start:
                active += max(0, min(now, end) - max(last, start))
            running[stage] += change
            last = now
        return active / (end - start)


@pytest.fixture(scope="module")
def scaled() -> dict[int, Scaled]:
    return {count: Scaled(machine) for count, machine in ((2, TWO), (4, FOUR))}


@pytest.mark.parametrize("count", [2, 4])
def test_each_stage_fetches_each_of_its_layers_once_for_every_group(
    scaled: dict[int, Scaled], count: int
) -> None:
    run = scaled[count]
    links = run.links()
    assert links.keys() == {"host->gpu", *(f"host->gpu {stage}" for stage in range(1, count))}
    for number, layers in enumerate(run.plan.stages):
        fetches = links["host->gpu" if number == 0 else f"host->gpu {number}"]
        assert Counter(task.layer for task in fetches) == dict.fromkeys(layers, count)
        moved = sum(task.work.nbytes for task in fetches)
        assert moved == count * sum(run.streamed[i] for i in layers)


def test_all_stages_are_active_at_once(scaled: dict[int, Scaled]) -> None:
    assert all(run.all_active() > 0.9 for run in scaled.values())


def test_twice_the_gpus_fetch_twice_the_bytes_so_that_no_link_is_relieved(scaled: dict[int, Scaled]) -> None:
    moved = {}
    for count, run in scaled.items():
        a_link_for_all = sum(run.streamed) / 12e9
        assert run.report.step_seconds[2] > a_link_for_all, "as with one GPU, whatever their number"
        moved[count] = sum(task.work.nbytes for tasks in run.links().values() for task in tasks)
    assert moved[4] / moved[2] == pytest.approx(2, rel=0.1), (
        "a little less, since more weights stay in more GPUs"
    )
    two, four = (run.report.decode_tokens_per_second for run in scaled.values())
    assert four < 1.5 * two, "not twice as many"


def test_the_links_of_the_stages_share_the_hosts_memory() -> None:
    slow = FOUR.memories | {"host": replace(FOUR.memories["host"], bandwidth=24e9)}
    run = Scaled(replace(FOUR, memories=slow))
    for fetches in run.links().values():
        rates = [task.work.nbytes / (task.end - task.start) for task in fetches]
        assert min(rates) < 6.5, "GB/s: four links of 12 read 24 together"


# -- planning --------------------------------------------------------------------------------------


def test_a_pipeline_is_planned_for_with_all_its_memories() -> None:
    budgets = {"gpu": 10**9}
    found = plan_best(TWO, SMALL, [100] * 256, 16, policies=["flexgen_pipeline"], budgets=budgets)
    assert found.attention_on_gpu and not found.schedule.kv_on_gpu
    assert found.schedule.peak_bytes.keys() > {"gpu", "gpu 1"}
    assert max(found.schedule.peak_bytes[name] for name in ("gpu", "gpu 1")) <= budgets["gpu"]
    assert found.schedule.weights_on_gpu == 1, "1.5 GB, of which one GPU holds two thirds at most"
    assert found.schedule.throughput <= found.schedule.bound

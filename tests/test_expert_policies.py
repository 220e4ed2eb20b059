"""Policies that decide where experts run: placement, Twiddler's Algorithm 1, llama.cpp's split, the FFN on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.shared.equal_bits import EXPERTS, SLOW_CPU
from moesched.calibration.exercise import FinishedTasks
from moesched.devices.torch.device import TorchDevice
from moesched.dispatch.expert_latencies import ExpertLatencies
from moesched.dispatch.expert_placement import order_of, popularity_of
from moesched.errors import BadInput
from moesched.machines import Machine, load_machine
from moesched.machines.staging import staged
from moesched.machines.sustained import at_peak
from moesched.models.config import ModelConfig
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.planner.search_policies import plan_best
from moesched.plugins import make_policy
from moesched.policies.layer_split import LayerSplit
from moesched.requests.batch import split_batch
from moesched.requests.workloads import load_workload
from moesched.routing.profile import RoutingProfile, write_profile
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.steps.plan import Plan
from moesched.tasks import HostKernel, Task
from moesched.testing import Case, run_on_symbols
from odd_models import PROMPTS, stored
from scripted_routing import with_rates

T4 = at_peak(load_machine("t4"))
POPULARITY = [[3, 1, 2], [9, 4, 7]]

# -- placement -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "order"),
    [
        ("popular", [(1, 0), (1, 2), (1, 1), (0, 0), (0, 2), (0, 1)]),
        ("worst", [(0, 1), (0, 2), (0, 0), (1, 1), (1, 2), (1, 0)]),
        ("balanced", [(0, 0), (1, 0), (0, 2), (1, 2), (0, 1), (1, 1)]),
        ("front", [(0, 0), (0, 2), (0, 1), (1, 0), (1, 2), (1, 1)]),
    ],
)
def test_a_placement_says_which_experts_stay_first(strategy: str, order: list[tuple[int, int]]) -> None:
    assert order_of(strategy, POPULARITY) == order


def test_equally_popular_experts_stay_evenly_over_the_layers_and_a_seed_gives_one_random_placement() -> None:
    assert order_of("popular", [[1.0] * 2] * 3) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    orders = [order_of("random", [[1.0] * 8] * 4, seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def plan_of(layers: int = 2, experts: int = 3) -> Plan:
    layout = Case(name="small", machine=T4, layers=layers, experts=experts).layout()
    return Plan(T4, layout, split_batch([2], 2, 1))


def written(counts: Sequence[Sequence[int]], folder: Path, top_k: int = 2) -> str:
    """A routing profile with these counts, as a file."""
    profile = RoutingProfile(
        model="small",
        layers=len(counts),
        experts=len(counts[0]),
        top_k=top_k,
        tokens=sum(map(sum, counts)),
        counts=tuple(map(tuple, counts)),
    )
    write_profile(profile, folder / "popularity.csv")
    return str(folder / "popularity.csv")


def test_a_popularity_comes_from_a_routing_profile_and_one_of_another_shape_is_refused(
    tmp_path: Path,
) -> None:
    plan = plan_of()
    file = written(POPULARITY, tmp_path, plan.layout.config.routed.top_k)
    assert [list(counts) for counts in popularity_of(plan, file)] == POPULARITY
    with pytest.raises(BadInput, match="but small has 2 layers of 4 experts"):
        popularity_of(plan_of(experts=4), written(POPULARITY, tmp_path))
    with pytest.raises(BadInput, match=r"placement is 'best': give one of popular, worst, random"):
        order_of("best", POPULARITY)
    with pytest.raises(BadInput, match="copy_from is -1: give 0 or more"):
        make_policy("layer_split", {"copy_from": -1})


# -- Algorithm 1 ---------------------------------------------------------------------------------------------------


MACHINES = {
    "a fast CPU": with_rates(link=1e9, cpu=1e12),
    "a slow CPU": with_rates(link=100e9, cpu=1e9),
    "a CPU that is faster for few tokens": with_rates(link=1e9, cpu=3e9),
}


def ran(machine: Machine, micro_batch_size: int = 2, **settings: Any) -> tuple[Any, list[Task]]:
    """Twiddler on symbols, with half of the experts on the GPU; what the policy planned, and its experts."""
    policy = make_policy("twiddler", {"experts": 6, **settings})
    case = Case(
        name="algorithm", machine=machine, weights=1.5, prompts=(9, 7), micro_batch_size=micro_batch_size
    )
    plan = case.plan(policy)
    ended = run_on_symbols(policy, plan)
    assert ended.tokens == ended.expected
    return policy, [task for task in ended.tasks if task.verb in ("run_expert", "fetch")]


def algorithm_1(at_gpu: frozenset[tuple[int, int]], machine: Machine, task: Task) -> str:
    """The processor that the paper runs an expert on."""
    s = task.work.tokens
    if (task.layer, task.expert) in at_gpu:
        return "gpu"
    flops, weights = 6 * s * 32 * 64, 3 * 32 * 64 * 2
    moved = weights + s * (2 * 32 + 3 * 64) * 2
    gpu = machine.processors["gpu"]
    cpu_lat = max(flops / machine.peak("cpu", "bfloat16"), moved / machine.memories["host"].bandwidth)
    gpu_lat = gpu.launch_seconds + max(
        flops / machine.peak("gpu", "bfloat16"), moved / machine.memories["gpu"].bandwidth
    )
    trans_lat = weights / machine.link("host", "gpu").bandwidth
    return "gpu, moved" if cpu_lat > gpu_lat + trans_lat else "cpu"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a fast CPU", {"gpu", "cpu"}),
        ("a slow CPU", {"gpu", "gpu, moved"}),
        ("a CPU that is faster for few tokens", {"gpu", "cpu", "gpu, moved"}),
    ],
)
def test_every_expert_runs_where_algorithm_1_says(name: str, expected: set[str]) -> None:
    machine = MACHINES[name]
    policy, tasks = ran(machine)
    assert len(policy.at_gpu) == 6
    places = []
    moved: tuple[int, int] | None = None
    for task in tasks:
        if task.verb == "fetch":
            moved = task.layer, task.expert
            continue
        place = "cpu" if isinstance(task, HostKernel) else "gpu"
        if moved is not None:
            assert moved == (task.layer, task.expert), "an expert is moved right before it runs"
            place, moved = "gpu, moved", None
        assert place == algorithm_1(policy.at_gpu, machine, task)
        places.append(place)
    assert set(places) == expected


def test_an_expert_that_several_micro_batches_chose_is_moved_once_and_decided_by_all_their_tokens() -> None:
    _, tasks = ran(MACHINES["a slow CPU"], micro_batch_size=1)
    moved = [(task.step, task.layer, task.expert) for task in tasks if task.verb == "fetch"]
    assert len(moved) == len(set(moved))
    users = Counter((task.step, task.layer, task.expert) for task in tasks if task.verb == "run_expert")
    assert 2 in (users[each] for each in moved), "no expert was moved for both"
    few = with_rates(link=1e9, cpu=3e9)
    places: dict[tuple[int, int, int], set[type[Task]]] = {}
    for task in ran(few, micro_batch_size=1)[1]:
        if task.verb == "run_expert":
            places.setdefault((task.step, task.layer, task.expert), set()).add(type(task))
    assert all(len(kinds) == 1 for kinds in places.values())


def test_latencies_are_those_of_the_machines_cost_model() -> None:
    layout = weight_layout(SHAPES["mixtral-8x7b"])
    plan = Plan(T4, layout, split_batch([2], 2, 1))
    latencies, operations = ExpertLatencies(plan), plan.operations
    for s in (1, 64, 4096):
        flops, nbytes, *_ = operations.fetched_expert(s)
        assert latencies.at_host(s) == pytest.approx(5e-6 + max(flops / 1.7e12, nbytes / 100e9))
        assert latencies.at_accelerator(s) == pytest.approx(5e-6 + max(flops / 65e12, nbytes / 320e9))
    assert latencies.transfer == pytest.approx(10e-6 + operations.expert_bytes / 12e9, rel=1e-3)


def test_experts_that_the_host_may_run_are_fetched_at_the_host_s_rate_where_a_disk_has_all_weights() -> None:
    layout = weight_layout(SHAPES["mixtral-0.8b"])
    latencies = ExpertLatencies(Plan(load_machine("t4-nvme"), layout, split_batch([2], 2, 1)))
    from_disk, from_host = (latencies.moving(layout.an_expert, role) for role in (None, "host"))
    assert latencies.transfer == from_host < from_disk


def test_what_stays_is_the_most_popular(tmp_path: Path) -> None:
    counts = [[100 * (e == 3) + i for e in range(4)] for i in range(3)]
    path = written(counts, tmp_path, Case(name="small", machine=T4).layout().config.routed.top_k)
    policy, _ = ran(T4, popularity=path, experts=4)
    assert policy.at_gpu == {(0, 3), (1, 3), (2, 3), (2, 0)}
    worst, _ = ran(T4, popularity=path, experts=4, placement="worst")
    assert worst.at_gpu == {(0, 0), (0, 1), (0, 2), (1, 0)}


def test_with_room_for_all_experts_none_is_left_to_the_host() -> None:
    policy: Any = make_policy("twiddler")
    plan = Case(name="roomy", machine=T4).plan(policy)
    assert len(policy.at_gpu) == 12
    assert not plan.declared.experts_on_host
    assert {task.lane.name for task in run_on_symbols(policy, plan).tasks if task.step > 0} == {"accelerator"}


# -- fixed splits --------------------------------------------------------------------------------------------------


def decode_tasks(name: str, machine: Machine = T4, **case: Any) -> list[Task]:
    settings = case.pop("settings", {})
    policy = make_policy(name, settings)
    plan = Case(name="split", machine=machine, **{"weights": 0.9, **case}).plan(policy)
    ended = run_on_symbols(policy, plan)
    assert ended.tokens == ended.expected
    return [task for task in ended.tasks if task.step > 0]


@pytest.mark.parametrize(("asked", "whole"), [(1, {0}), (0, set()), (-1, {0, 1})])
def test_layer_split_runs_the_first_layers_on_the_accelerator_and_moves_no_weights(
    asked: int, whole: set[int]
) -> None:
    tasks = decode_tasks("layer_split", settings={"gpu_layers": asked})
    assert {task.layer for task in tasks if task.verb == "post_attention"} == whole
    experts = [task for task in tasks if task.verb == "run_expert"]
    assert all(isinstance(task, HostKernel) for task in experts)
    assert {task.layer for task in experts} == set(range(3)) - whole
    assert not any(task.verb == "fetch" for task in tasks)


@pytest.mark.parametrize(("copy_from", "copied"), [(32, {1, 2}), (31, {0, 1, 2}), (33, {2}), (0, set())])
def test_layer_split_copies_the_hosts_experts_for_micro_batches_of_many_tokens(
    copy_from: int, copied: set[int]
) -> None:
    """One layer of three stays; the prompts are micro-batches of 31, 32 and 80 tokens."""
    policy = make_policy("layer_split", {"gpu_layers": 1, "copy_from": copy_from})
    case = Case(name="copies", machine=T4, weights=1.5, prompts=(31, 32, 80), micro_batch_size=1)
    ended = run_on_symbols(policy, case.plan(policy))
    assert ended.tokens == ended.expected
    experts = [task for task in ended.tasks if task.verb == "run_expert"]
    on_gpu = {(task.step, task.micro_batch) for task in experts if not isinstance(task, HostKernel)}
    assert on_gpu == {(0, j) for j in copied}
    fetches = [task for task in ended.tasks if task.verb == "fetch"]
    assert len(fetches) == 2 * len(copied)


@pytest.mark.parametrize("chunk", [20, 40])
def test_a_chunk_of_a_prompt_is_a_batch_of_its_own_to_layer_split(chunk: int) -> None:
    policy = make_policy("layer_split", {"gpu_layers": 0})
    layout = Case(name="chunks", machine=T4).layout()
    batch = msgspec.structs.replace(split_batch([85], 2, 1), prefill_chunk=chunk)
    ended = run_on_symbols(policy, plan_run(T4, layout, batch, policy))
    assert ended.tokens == ended.expected
    fetched = sum(task.verb == "fetch" for task in ended.tasks)
    assert fetched == {20: 0, 40: 2 * 3}[chunk]


def test_layer_split_copies_as_many_experts_at_once_as_there_is_room_for() -> None:
    policy = LayerSplit(gpu_layers=0)
    plan = Case(name="tight", machine=T4, weights=0.6, prompts=(80,), micro_batch_size=1).plan(policy)
    ended = run_on_symbols(policy, plan)
    assert 0 < policy.at_once < plan.layout.config.routed.experts
    assert sum(task.verb == "fetch" for task in ended.tasks) == 2 * 3


def test_cpu_ffn_moves_weights_for_prompts_only() -> None:
    policy = make_policy("cpu_ffn")
    ended = run_on_symbols(policy, Case(name="ffn", machine=T4, weights=0.9).plan(policy))
    experts = [task for task in ended.tasks if task.verb == "run_expert"]
    assert {isinstance(task, HostKernel) for task in experts if task.step == 0} == {False}
    assert {isinstance(task, HostKernel) for task in experts if task.step > 0} == {True}
    fetched = [(task.layer, task.expert) for task in ended.tasks if task.verb == "fetch"]
    assert len(set(fetched)) == len(fetched)
    assert {task.step for task in ended.tasks if task.verb == "fetch"} == {0}


@pytest.mark.parametrize(
    ("share", "verbs"), [(0.0, {"cpu_attention"}), (0.5, {"cpu_attention", "attention"})]
)
def test_cpu_ffn_attends_where_the_cache_is(share: float, verbs: set[str]) -> None:
    tasks = decode_tasks("cpu_ffn", settings={"kv_on_gpu": share})
    assert {task.verb for task in tasks} & {"cpu_attention", "attention"} == verbs


def spans(tasks: list[Task], *verbs: str) -> Iterator[tuple[int, int]]:
    return ((task.start, task.end) for task in tasks if task.verb in verbs)


def test_the_accelerator_attends_for_one_micro_batch_while_the_cpu_runs_the_experts_of_another() -> None:
    tasks = decode_tasks("cpu_ffn")
    on_host = list(spans(tasks, "run_expert"))
    together = sum(
        max(0, min(end, last) - max(start, first))
        for first, last in spans(tasks, "pre_attention", "attention", "route")
        for start, end in on_host
    )
    assert together > 0


# -- the planner ---------------------------------------------------------------------------------------------------


def test_where_links_are_slow_and_answers_short_the_planner_has_the_ffn_on_the_cpu() -> None:
    best = plan_best(
        staged(load_machine("t4"), "600MB", ring=False),
        weight_layout(SHAPES["mixtral-0.8b"]),
        load_workload("synthetic-reasoning").lengths(1024, seed=0),
        4,
        policies=["cpu_ffn", "cgopipe", "flexgen", "expert_cache", "twiddler"],
        budgets={"gpu": 600_000_000, "host": 1_590_000_000},
        band=False,
    )
    assert best.ranking[0].policy == "cpu_ffn"
    assert not best.ffn_on_gpu
    assert 0 < best.schedule.kv_on_gpu < 1
    assert best.bound_by == "host"


PLAIN = [config for config, _ in EXPERTS.models if not config.formats]
"""Models whose experts take so long to load that some are faster on the slow CPU."""


# -- on tensors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", PLAIN, ids=lambda config: config.name)
def test_twiddler_really_runs_experts_in_all_three_ways(model: ModelConfig, tmp_path: Path) -> None:
    device = TorchDevice(stored(model, tmp_path), weight_layout(model, "float32"))
    policy: Any = make_policy("twiddler", {"experts": 4})
    batch = split_batch([len(each) for each in PROMPTS], 4, 2)
    plan = plan_run(SLOW_CPU, device.layout, batch, policy, {}, device.slot_bytes)
    finished = FinishedTasks()
    run(plan, policy, device, PROMPTS, observers=[finished])
    tasks = [task for task in finished.tasks if task.step >= 0]
    experts = [task for task in tasks if task.verb == "run_expert"]
    assert {isinstance(task, HostKernel) for task in experts} == {True, False}
    assert any(task.verb == "fetch" for task in tasks)
    assert any((task.layer, task.expert) in policy.at_gpu for task in experts)

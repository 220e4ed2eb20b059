"""A KV cache in two memories, by micro-batches or layers: the same bits for every share, and the planner's share."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.shared.small_runs import same_bits
from clocks_in_turn import PLAIN, in_turn
from moesched.cli.main import main
from moesched.devices.torch.device import TorchDevice
from moesched.dispatch import double_buffered
from moesched.errors import BadInput, PolicyError
from moesched.inputs.options import Objective, SizeOptions
from moesched.jobs.simulate_model import simulate_model
from moesched.machines import Machine, load_machine
from moesched.machines.cost import cost_model
from moesched.machines.sustained import at_peak
from moesched.machines.toml_text import machine_toml
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.planner.search_policies import plan_best
from moesched.planner.setting import Setting
from moesched.planner.sizing import choose_sizes
from moesched.planner.trial_run import trial_run
from moesched.plugins import find, make_policy
from moesched.policies.flexgen import FlexGen
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.seams import Policy
from moesched.steps.plan import Plan
from moesched.steps.roles import Role
from moesched.testing import Case, check_policy, policy_cases, run_on_symbols
from odd_runs import one_batch
from runs import cached_on_host
from small_models import SMALL, small_model

SPLITTING = ("cgopipe", "flexgen", "three_tiers")
T4 = at_peak(load_machine("t4"))
PROMPTS = [[5, 6, 7], [8, 9], [1, 2, 3, 4, 5, 6, 7], [90], [11, 12], [13, 14, 15]]


# -- what a run comes to -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(
        small_model(tmp_path_factory.mktemp("models") / "model", config=SMALL.varied(layers=3))
    )


@pytest.mark.parametrize(
    ("policy", "prompts"),
    [
        *((policy, PROMPTS) for policy in SPLITTING),
        ("cgopipe", [[5, 6, 7, 8, 9]]),
        ("cpu_ffn", [[*range(1, 40)]]),
        ("flexgen", [[5, 6, 7, 8, 9]]),
        ("moe_gen", [[*range(1, 40)]]),
    ],
)
def test_every_share_gives_the_same_logits_to_the_bit(
    checkpoint: Checkpoint, policy: str, prompts: list[list[int]]
) -> None:
    """The caches of several requests are divided by micro-batches, that of one by layers."""
    layout = weight_layout(checkpoint.config, "float32")
    none, *others = (
        one_batch(
            TorchDevice(checkpoint, layout, keep_logits=True),
            policy,
            {"kv_on_gpu": share},
            weights=0.8 if len(prompts) > 1 else 2.0,
            prompts=prompts,
            size=1,
        )
        for share in ((0.0, 0.5, 1.0) if len(prompts) > 1 else (0.0, 1 / 3, 2 / 3, 1.0))
    )
    for other in others:
        assert other.tokens == none.tokens
        assert same_bits(other.logits_RSV, none.logits_RSV)


class ByLayers(FlexGen):
    """FlexGen with the KV caches of all micro-batches placed by layers, every other one on the accelerator."""

    def plan(self, plan: Plan) -> None:
        plan.place_kv("accelerator", layers=plan.layers[::2])
        plan.place_kv("host", layers=plan.layers[1::2])
        plan.reserve_kv_buffers(2)
        plan.discipline = "in_order"
        plan.limit_in_flight(2)
        self.streamed, self.buffer = double_buffered(plan)


SPLIT: list[Callable[[], Policy]] = [
    *(partial(make_policy, policy, {"kv_on_gpu": 0.5}) for policy in SPLITTING),
    *(partial(make_policy, policy, {"kv_on_gpu": 1.0}) for policy in ("cgopipe", "flexgen")),
    ByLayers,
]


@pytest.mark.parametrize(("number", "make"), [*enumerate(SPLIT)])
def test_a_policy_with_a_split_cache_conforms(number: int, make: Callable[[], Policy]) -> None:
    """Each runs in every case on the plain virtual clock, and in some of them on one of the other clocks in turn."""
    assert check_policy(make, clocks=[PLAIN]) >= len(policy_cases()) // 2
    assert check_policy(make, *in_turn(number, policy_cases()))


@pytest.mark.parametrize(
    ("policy", "at_home", "away"),
    [
        ("cgopipe", {"attention"}, {"offload_qkv", "cpu_attention", "load_hidden"}),
        ("flexgen", {"attention"}, {"load_kv", "attention", "offload_kv"}),
    ],
)
def test_keys_and_values_move_only_where_the_host_has_them(
    policy: str, at_home: set[str], away: set[str]
) -> None:
    chosen = make_policy(policy, {"kv_on_gpu": 0.5})
    plan = Case(name="split", machine=T4, prompts=(3,) * 4, micro_batch_size=1).plan(chosen)
    resident = set(plan.kv.held_by("accelerator"))
    ended = run_on_symbols(chosen, plan)
    assert ended.tokens == ended.expected
    common = {"embed", "pre_attention", "post_attention", "sample"}
    for number in plan.micro_batches:
        verbs = {task.verb for task in ended.tasks if task.step == 1 and task.micro_batch == number}
        assert verbs - common == (at_home if number in resident else away)


# -- budgets -----------------------------------------------------------------------------------------------------------


def planned(share: float, micro_batches: int, prompt: int = 100, policy: str = "cgopipe") -> Plan:
    """A policy's plan of micro-batches of two requests each, on a T4."""
    batch = split_batch([prompt] * 2 * micro_batches, 12, 2)
    layout = weight_layout(SHAPES["mixtral-0.8b"])
    return plan_run(T4, layout, batch, make_policy(policy, {"kv_on_gpu": share}))


@settings(max_examples=30, deadline=None)
@given(share=st.floats(0, 1), micro_batches=st.integers(2, 9), prompt=st.integers(1, 300))
def test_each_memory_reserves_the_cache_that_it_holds_and_no_other(
    share: float, micro_batches: int, prompt: int
) -> None:
    none, some = (planned(each, micro_batches, prompt) for each in (0.0, share))
    here = some.kv.held_by("accelerator")
    assert len(here) == round(share * micro_batches)
    assert sorted(here + some.kv.held_by("host")) == list(some.micro_batches)
    each = len(some.layers) * some.operations.kv_bytes * some.batch.tokens_at_end(some.batch.micro_batches[0])
    assert cached_on_host(none) - cached_on_host(some) == len(here) * each
    assert without_weights(some) - without_weights(none) == len(here) * each


def without_weights(plan: Plan) -> int:
    pools = (*plan.weights.pools, *plan.weights.resident)
    fast = plan.memory("accelerator")
    return fast.used - sum(pool.nbytes for pool in pools if pool.memory is fast)


@settings(max_examples=30, deadline=None)
@given(share=st.floats(0, 1), micro_batches=st.integers(2, 40))
def test_caches_on_the_accelerator_lie_evenly_among_the_others(share: float, micro_batches: int) -> None:
    here = planned(share, micro_batches).kv.held_by("accelerator")
    for start in range(micro_batches):
        for length in range(1, micro_batches - start + 1):
            held = sum(start <= number < start + length for number in here)
            assert abs(held - length * len(here) / micro_batches) <= 1


def test_room_to_load_into_is_only_kept_for_what_the_host_has() -> None:
    assert planned(0.5, 4, policy="flexgen").kv.slots == 2
    assert planned(1.0, 4, policy="flexgen").kv.slots == 0


# -- refusals ----------------------------------------------------------------------------------------------------------


class Placing(FlexGen):
    """FlexGen with parts of its KV caches placed as told."""

    def __init__(self, *placed: tuple[Role, dict[str, list[int]]]) -> None:
        super().__init__()
        self.placed = placed

    def plan(self, plan: Plan) -> None:
        for role, parts in self.placed:
            plan.place_kv(role, **parts)


@pytest.mark.parametrize(
    ("placed", "says"),
    [
        (
            [("host", {"micro_batches": [0, 1]}), ("accelerator", {"micro_batches": [1]})],
            "place_kv: the KV cache of mb1 is the host's already: place each once",
        ),
        (
            [("host", {"layers": [0, 1]}), ("accelerator", {"layers": [1]})],
            "the KV cache of mb0 is the host's already",
        ),
        ([("accelerator", {"micro_batches": [0]})], "has no place for the KV cache of mb1: call plan.place_kv"),
        ([("host", {"layers": [0]})], "has no place for the KV cache of mb0: call plan.place_kv"),
        ([("host", {"layers": [99]})], "place_kv: there is no L99: layers go from 0 to"),
    ],
)  # fmt: skip
def test_each_part_of_a_cache_is_placed_once(placed: list[Any], says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        Case(name="placing", machine=T4).plan(Placing(*placed))


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_is_between_nothing_and_all(share: float) -> None:
    with pytest.raises(
        BadInput, match=rf"kv_on_gpu is {share:g}: give the share of the KV cache .* from 0 to 1"
    ):
        planned(share, 2)


# -- the planner -------------------------------------------------------------------------------------------------------

PROMPTS_OF_1024 = (1024,) * 64
WEAK_CPU = replace(T4.processors[T4.roles.host], flops={"bfloat16": 2e10, "float32": 1e10})
WEAK_HOST = replace(T4, processors=T4.processors | {T4.roles.host: WEAK_CPU})
ROOM = {"gpu": 1_400_000_000}
"""For a part of the weights of `mixtral-0.8b`, or of the KV cache of those prompts."""


def asking(policy: str, machine: Machine, **share: float) -> Setting:
    layout = weight_layout(SHAPES["mixtral-0.8b"])
    return Setting(
        make=find("policies", policy),
        machine=machine,
        layout=layout,
        lengths=PROMPTS_OF_1024,
        new_tokens=64,
        cost=cost_model(machine, layout.dtype),
        budgets=ROOM,
        splits_kv=True,
        kv_on_gpu=share.get("kv_on_gpu"),
    )


def fastest(
    policy: str, machine: Machine, share: float | None = None, room: int = ROOM["gpu"]
) -> tuple[float, float]:
    """Tokens per second of the planner's choice, with any share or with this one, and its share."""
    found = plan_best(
        machine,
        weight_layout(SHAPES["mixtral-0.8b"]),
        PROMPTS_OF_1024,
        64,
        policies=[policy],
        settings={} if share is None else {"kv_on_gpu": share},
        budgets={"gpu": room},
        band=False,
    )
    assert found.schedule.peak_bytes["gpu"] <= room
    return found.schedule.throughput, found.schedule.kv_on_gpu


@pytest.mark.usefixtures("as_users_run")
def test_where_the_host_attends_too_slowly_a_part_of_the_cache_on_the_gpu_beats_none_and_all() -> None:
    throughput, share = fastest("cgopipe", WEAK_HOST)
    assert 0 < share < 1
    assert throughput > 1.2 * fastest("cgopipe", WEAK_HOST, 0.0)[0]
    assert throughput > 1.2 * fastest("cgopipe", WEAK_HOST, 1.0)[0]


@pytest.mark.usefixtures("as_users_run")
@pytest.mark.parametrize(
    ("policy", "room", "best"), [("cgopipe", 1_800_000_000, 1.0), ("flexgen", 1_000_000_000, 0.0)]
)
def test_a_share_that_is_searched_is_as_fast_as_none_or_all_where_that_is_best(
    policy: str, room: int, best: float
) -> None:
    assert fastest(policy, WEAK_HOST, room=room)[0] >= 0.98 * fastest(policy, WEAK_HOST, best, room)[0]


@pytest.mark.usefixtures("as_users_run")
def test_a_share_that_is_given_is_kept() -> None:
    assert fastest("cgopipe", T4, 0.25)[1] == pytest.approx(
        0.25, abs=0.09
    )  # of few micro-batches, whole ones


@pytest.mark.usefixtures("as_users_run")
def test_sizes_come_with_a_share_whether_they_were_given_or_not() -> None:
    where = asking("cgopipe", WEAK_HOST)
    sizes = choose_sizes(where, successive=False)
    assert sizes.kv_on_gpu is not None and 0 < sizes.kv_on_gpu < 1
    given = choose_sizes(
        where, SizeOptions(batch_size=sizes.batch_size, micro_batch_size=sizes.micro_batch_size)
    )
    assert given.kv_on_gpu == pytest.approx(sizes.kv_on_gpu, abs=0.15)


@pytest.mark.usefixtures("as_users_run")
def test_a_simulation_without_sizes_has_the_planners_share(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machine = tmp_path / "weak.toml"
    machine.write_text(machine_toml(WEAK_HOST))
    common = ["--model", "mixtral-0.8b", "--machine", str(machine), "--policy", "cgopipe", "--gen", "16"]
    common += ["--workload", "summarization", "--budget", "gpu=1400MB", "--json"]
    shares = []
    for command, *less in (["plan"], ["simulate", "--no-helps"]):
        assert main([command, "--no-band", *less, *common]) == 0
        shares.append(json.loads(capsys.readouterr().out)["plan"]["kv_on_gpu"])
    assert 0 < shares[0] < 1
    assert shares[1] == pytest.approx(shares[0], abs=0.1)


@pytest.mark.parametrize("policy", ["fastdecode", "flexgen_cpu"])
def test_a_policy_named_for_attention_on_the_cpu_attends_there_whatever_fits(policy: str) -> None:
    report = simulate_model(
        "mixtral-0.8b", machine="h100", policy=policy, workload=[[1, 2, 3]] * 4, gen=3, band=False
    )
    assert report.plan.kv_on_gpu == 0


# -- one long request, by layers -------------------------------------------------------------------------------------


LAYERS = 16


LAYOUT = weight_layout(SHAPES["mixtral-0.8b"].varied(layers=LAYERS))


LONG = split_batch([16_000], 12, 1)


def test_keys_and_values_move_only_in_the_layers_that_the_host_has() -> None:
    policy = ByLayers()
    plan = Case(name="split", machine=T4, prompts=(3,) * 2, micro_batch_size=1).plan(policy)
    ended = run_on_symbols(policy, plan)
    assert ended.tokens == ended.expected
    loaded = {task.layer for task in ended.tasks if task.verb == "load_kv"}
    saved = {task.layer for task in ended.tasks if task.verb == "offload_kv"}
    assert loaded == saved == set(plan.layers[1::2])


# -- budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_users_run")
@pytest.mark.parametrize("policy", ["layer_split", "twiddler"])
def test_peak_and_decode_time_have_no_step_where_the_budget_grows(policy: str) -> None:
    layer = CACHE // LAYERS
    least = next(budget for budget in range(500_000_000, 4_000_000_000, layer) if fits(policy, budget))
    found = [peak_share_and_step(policy, least + layer * more) for more in range(LAYERS + 2)]
    shares = [share for _, share, _ in found]
    assert shares[0] < 0.2 and shares[-1] == 1
    assert all(0 <= after - before <= 2 / LAYERS for before, after in pairwise(shares))
    peaks = [peak for peak, _, _ in found]
    assert all(0 <= after - before <= 2 * layer for before, after in pairwise(peaks))
    steps = [step for _, _, step in found]
    saved = steps[0] - steps[-1]
    assert saved > 0
    assert all(-1e-9 <= before - after <= 0.2 * saved for before, after in pairwise(steps))


@pytest.mark.usefixtures("as_users_run")
@pytest.mark.parametrize("objective", ["latency", "interactive"])
def test_the_plan_for_one_request_falls_off_no_cliff_where_the_budget_grows(objective: Objective) -> None:
    layout = weight_layout(SHAPES["mixtral-0.8b"])
    policies = ["twiddler_makespan", "cpu_ffn", "layer_split", "cgopipe"]
    rates = [
        plan_best(
            T4,
            layout,
            [8_000],
            12,
            objective=objective,
            policies=policies,
            budgets={"gpu": budget},
            band=False,
        ).schedule.rate
        for budget in (800_000_000, 900_000_000, 950_000_000, 1_000_000_000, 1_100_000_000)
    ]
    assert all(0.97 * less <= more <= 1.15 * less for less, more in pairwise(rates))
    assert rates[-1] > 1.05 * rates[0]


def fits(policy: str, budget: int) -> bool:
    try:
        planned_long(policy, budget)
    except BadInput:
        return False
    return True


def peak_share_and_step(policy: str, budget: int) -> tuple[int, float, float]:
    made = make_policy(policy, {})
    plan = plan_run(T4, LAYOUT, LONG, made, {"gpu": budget})
    return plan.memory("accelerator").peak, plan.kv.on_gpu, trial_run(plan, made).step_seconds


def planned_long(policy: str, budget: int, **settings: float) -> Plan:
    return plan_run(T4, LAYOUT, LONG, make_policy(policy, settings), {"gpu": budget})


CACHE = planned_long("cgopipe", 8_000_000_000).reservations.cache_bytes([0], range(LAYERS))
"""Bytes of the whole KV cache."""


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_each_memory_reserves_the_layers_that_it_holds(share: float) -> None:
    none, some = (planned_long("cgopipe", 8_000_000_000, kv_on_gpu=each) for each in (0.0, share))
    assert some.kv.on_gpu == share
    assert cached_on_host(none) - cached_on_host(some) == share * CACHE

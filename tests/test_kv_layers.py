"""The KV cache of one request in two memories, by layers: the same bits, and no step where a budget grows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.shared.small_runs import TWO_MEMORIES, generate, same_bits
from moesched.devices.emulated.device import EmulatedDevice
from moesched.devices.torch.device import TorchDevice
from moesched.dispatch import double_buffered
from moesched.errors import BadInput
from moesched.inputs.options import Objective
from moesched.machines import load_machine
from moesched.machines.sustained import at_peak
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.planner import plan_best
from moesched.planner.trial_run import trial_run
from moesched.plugins import make_policy
from moesched.policies.flexgen import FlexGen
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.steps.plan import Plan
from moesched.testing import Case, check_policy, policy_cases, run_on_symbols
from runs import cached_on_host
from small_models import SMALL, small_model

T4 = at_peak(load_machine("t4"))
LAYERS = 16
LAYOUT = weight_layout(SHAPES["mixtral-0.8b"].varied(layers=LAYERS))
LONG = split_batch([16_000], 12, 1)
SHARES = (0.0, 1 / 3, 2 / 3, 1.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("models") / "model"
    return open_checkpoint(small_model(folder, config=SMALL.varied(layers=3)))


# -- what a run comes to -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["cgopipe", "cpu_ffn", "flexgen", "moe_gen"])
@pytest.mark.parametrize("prompt", [[5, 6, 7, 8, 9], list(range(1, 40))])
def test_every_share_of_one_request_gives_the_same_logits_to_the_bit(
    checkpoint: Checkpoint, policy: str, prompt: list[int]
) -> None:
    layout = weight_layout(checkpoint.config, "float32")
    none, *others = (
        generate(
            TorchDevice(checkpoint, layout, keep_logits=True),
            make_policy(policy, {"kv_on_gpu": share}),
            TWO_MEMORIES,
            [prompt],
            new_tokens=4,
            micro_batch_size=1,
        )
        for share in SHARES
    )
    for other in others:
        assert other.tokens == none.tokens
        assert same_bits(other.logits_RSV, none.logits_RSV)


def test_the_emulated_device_has_the_same_tokens_for_every_share(checkpoint: Checkpoint) -> None:
    layout = weight_layout(checkpoint.config, "float32")

    def tokens(share: float) -> list[list[int]]:
        device: Any = EmulatedDevice(checkpoint, layout, keep_logits=True, dilation=1.0)
        policy = make_policy("cgopipe", {"kv_on_gpu": share})
        return generate(device, policy, TWO_MEMORIES, [[5, 6, 7]], new_tokens=3, micro_batch_size=1).tokens

    assert tokens(1 / 3) == tokens(2 / 3) == tokens(0.0)


class ByLayers(FlexGen):
    """FlexGen with the KV caches of all micro-batches placed by layers, every other one on the accelerator."""

    def plan(self, plan: Plan) -> None:
        plan.place_kv("accelerator", layers=plan.layers[::2])
        plan.place_kv("host", layers=plan.layers[1::2])
        plan.reserve_kv_buffers(2)
        plan.discipline = "in_order"
        plan.limit_in_flight(2)
        self.streamed, self.buffer = double_buffered(plan)


def test_caches_of_several_micro_batches_divide_by_layers_too() -> None:
    assert check_policy(ByLayers) >= len(policy_cases()) // 2


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
    least = next(budget for budget in range(500_000_000, 4_000_000_000, layer) if _fits(policy, budget))
    found = [_peak_share_and_step(policy, least + layer * more) for more in range(LAYERS + 2)]
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
            T4, layout, [8_000], 12, objective=objective, policies=policies, budgets={"gpu": budget}
        ).seen.rate
        for budget in (800_000_000, 900_000_000, 950_000_000, 1_000_000_000, 1_100_000_000)
    ]
    assert all(0.97 * less <= more <= 1.15 * less for less, more in pairwise(rates))
    assert rates[-1] > 1.05 * rates[0]


def _fits(policy: str, budget: int) -> bool:
    try:
        _planned(policy, budget)
    except BadInput:
        return False
    return True


def _planned(policy: str, budget: int, **settings: float) -> Plan:
    return plan_run(T4, LAYOUT, LONG, make_policy(policy, settings), {"gpu": budget})


def _peak_share_and_step(policy: str, budget: int) -> tuple[int, float, float]:
    made = make_policy(policy, {})
    plan = plan_run(T4, LAYOUT, LONG, made, {"gpu": budget})
    return plan.memory("accelerator").peak, plan.kv.on_gpu, trial_run(plan, made).step_seconds


CACHE = _planned("cgopipe", 8_000_000_000).reservations.cache_bytes([0], range(LAYERS))
"""Bytes of the whole KV cache."""


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_each_memory_reserves_the_layers_that_it_holds(share: float) -> None:
    none, some = (_planned("cgopipe", 8_000_000_000, kv_on_gpu=each) for each in (0.0, share))
    assert some.kv.on_gpu == share
    assert cached_on_host(none) - cached_on_host(some) == share * CACHE


# -- refusals ----------------------------------------------------------------------------------------------------------

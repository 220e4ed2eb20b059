"""Policies for few requests: the KV cache that fast memory has no room for lies on the host, with the same tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

import moesched
from moesched.devices.shared.page_reader import PageReader
from moesched.machines import load_machine
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import Batch, split_batch
from moesched.runs.planning import plan_run
from moesched.steps.plan import Plan

POLICIES = ("twiddler", "twiddler_makespan", "layer_split")
CACHES = ("lru_offload", "expert_cache", "prefetch_gate")
"""All micro-batches are within a layer at once, which takes more room."""
LONG = (1200, 1100, 900, 1000)


def planned(policy: str, gpu: int, chunk: int | None = None) -> Plan:
    """A plan of four long prompts, each a micro-batch, with this many bytes of fast memory."""
    batch = Batch(LONG, 4, ((0,), (1,), (2,), (3,)), prefill_chunk=chunk)
    layout = weight_layout(SHAPES["mixtral-0.8b"])
    return plan_run(load_machine("t4"), layout, batch, make_policy(policy), {"gpu": gpu})


@pytest.mark.parametrize("chunk", [None, 256])
@pytest.mark.parametrize("policy", POLICIES)
def test_as_much_of_the_cache_stays_as_fits_and_never_less_with_more_memory(
    policy: str, chunk: int | None
) -> None:
    least = next(mb for mb in range(200, 400, 4) if fits(policy, mb * 1_000_000, chunk))
    shares = [planned(policy, (least + more) * 1_000_000, chunk).kv.on_gpu for more in range(0, 60, 4)]
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert shares == sorted(shares)
    assert {0.25, 0.5, 0.75} <= set(shares)


def fits(policy: str, gpu: int, chunk: int | None) -> bool:
    try:
        planned(policy, gpu, chunk)
    except moesched.BadInput:
        return False
    return True


@pytest.mark.parametrize(
    ("policy", "gpu"),
    [*((each, 450_000_000) for each in POLICIES), *((each, 600_000_000) for each in CACHES)],
)
def test_a_long_context_under_a_small_budget_runs(policy: str, gpu: int) -> None:
    wanted: dict[str, Any] = {
        "machine": "t4",
        "policy": policy,
        "workload": moesched.given_lengths([16_000], 3),
        "band": False,
    }
    roomy = moesched.simulate_model("mixtral-0.8b", **wanted)
    tight = moesched.simulate_model("mixtral-0.8b", budgets={"gpu": gpu}, **wanted)
    assert roomy.plan.kv_on_gpu == 1.0
    assert tight.plan.kv_on_gpu < roomy.plan.kv_on_gpu
    assert tight.peak_bytes["gpu"] <= gpu
    assert any(kind.kind == "cpu_attention" for kind in tight.kinds)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    choose = random.Random(2)
    return [[choose.randrange(256) for _ in range(40 + request)] for request in range(4)]


SIZES: dict[str, Any] = {"max_new_tokens": 5, "batch_size": 4, "micro_batch_size": 1}


@pytest.fixture(scope="module")
def expected(model: Path, prompts: list[list[int]]) -> list[list[int]] | None:
    """Tokens of a run with everything in fast memory and whole prompts."""
    return moesched.run_model(model, prompts, policy="resident", **SIZES).tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "chunk"),
    [
        ("twiddler", None),
        ("twiddler", 16),
        ("twiddler_makespan", None),
        ("layer_split", 16),
        ("lru_offload", None),
        ("expert_cache", 16),
        ("prefetch_gate", None),
    ],
)
def test_tokens_are_the_same_wherever_the_cache_lies(
    model: Path, prompts: list[list[int]], expected: list[list[int]] | None, policy: str, chunk: int | None
) -> None:
    on_two: dict[str, Any] = {
        "device": "emulated",
        "machine": "t4",
        "device_settings": {"dilation": 1},
        "prefill_chunk": chunk,
        **SIZES,
    }
    budgets: dict[float, int] = {}
    for budget in range(250_000, 660_000, 17_000):
        share = share_that_stays(model, prompts, policy, budget, chunk)
        if share is not None:
            budgets.setdefault(share, budget)
    assert set(budgets) > {0.0, 1.0}
    for share in {0.0, 1.0, *sorted(budgets)[1:-1:3]}:
        report = moesched.run_model(model, prompts, policy=policy, budgets={"gpu": budgets[share]}, **on_two)
        assert report.plan.kv_on_gpu == share
        assert report.tokens == expected


def share_that_stays(
    model: Path, prompts: Sequence[Sequence[int]], policy: str, gpu: int, chunk: int | None
) -> float | None:
    """Of the KV cache, on the accelerator; None where nothing fits."""
    checkpoint = open_checkpoint(model)
    layout = weight_layout(checkpoint.config)
    batch = msgspec.structs.replace(split_batch(list(map(len, prompts)), 5, 1), prefill_chunk=chunk)
    with closing(PageReader(checkpoint, layout)) as reader:
        try:
            plan = plan_run(
                load_machine("t4"), layout, batch, make_policy(policy), {"gpu": gpu}, reader.bytes_in_slot
            )
        except moesched.BadInput:
            return None
    return plan.kv.on_gpu

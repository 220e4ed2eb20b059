"""The lagging device: CUDA's code path gives the bits of the CPU, in whatever order its streams run."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import msgspec
import pytest
from _small_runs import TWO_MEMORIES, Generated, generate, same_bits

from moesched.devices.lagging.device import LaggingDevice, LaggingGpu
from moesched.devices.torch.device import TorchDevice
from moesched.devices.torch.kv_cache import BlockedKV
from moesched.machines import Machine
from moesched.models.checkpoint import Checkpoint
from moesched.plugins import make_policy
from odd_models import MIXTRAL, PROMPTS, layout_of, stored
from policies_for_two_memories import POLICIES

STREAM_MOST = {
    "layer_streaming",
    "cgopipe",
    "flexgen",
    "flexgen_cpu",
    "expert_streaming",
    "cpu_ffn",
    "layer_split",
}
"""Policies that run where fast memory has room for a part of the weights; others stream by settings, or keep all."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return stored(MIXTRAL, tmp_path_factory.mktemp("models"))


def generated(
    device: TorchDevice,
    policy: str,
    settings: Mapping[str, int],
    *,
    machine: Machine = TWO_MEMORIES,
    weights: float = 2.0,
    keep_open: bool = False,
) -> Generated:
    return generate(
        device,
        make_policy(policy, dict(settings)),
        machine,
        PROMPTS,
        new_tokens=4,
        micro_batch_size=2,
        weights=weights,
        keep_open=keep_open,
    )


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> Generated:
    device = TorchDevice(checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True, kernel="torch")
    return generated(device, "resident", {})


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("policy", "settings"), POLICIES)
def test_two_batches_of_every_policy_have_the_bits_of_the_cpu(
    checkpoint: Checkpoint, expected: Generated, policy: str, settings: Mapping[str, int], seed: int
) -> None:
    """Fast memory has room for all else, and for a part of the weights where the policy takes that."""
    device = LaggingDevice(
        checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True, gpu=LaggingGpu(seed=seed)
    )
    weights = 0.8 if policy in STREAM_MOST else 2.0
    for last in (False, True):
        found = generated(device, policy, settings, weights=weights, keep_open=not last)
        assert found.tokens == expected.tokens
        assert same_bits(found.logits_RSV, expected.logits_RSV)


@pytest.mark.parametrize("seed", range(5))
def test_links_may_have_any_names(checkpoint: Checkpoint, expected: Generated, seed: int) -> None:
    links = [
        msgspec.structs.replace(link, path=f"wire {number}") for number, link in enumerate(TWO_MEMORIES.links)
    ]
    machine = msgspec.structs.replace(TWO_MEMORIES, links=links)
    device = LaggingDevice(
        checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True, gpu=LaggingGpu(seed=seed)
    )
    assert same_bits(generated(device, "cgopipe", {}, machine=machine).logits_RSV, expected.logits_RSV)


@pytest.mark.parametrize("policy", ["cgopipe", "flexgen", "layer_streaming"])
def test_batch_after_batch_takes_the_same_memory(checkpoint: Checkpoint, policy: str) -> None:
    device = LaggingDevice(checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True)
    in_use, caches = [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            generated(device, policy, {}, keep_open=True)
            in_use.append(device.gpu.memory.in_use())
            caches.append(sum(isinstance(each, BlockedKV) for each in gc.get_objects()))
    finally:
        gc.enable()
        device.close()
    # torch keeps frames of the first calls.
    assert in_use[1:] == in_use[1:2] * 3
    assert caches[1:] == caches[1:2] * 3


@pytest.mark.parametrize("policy", ["cgopipe", "flexgen", "layer_streaming"])
def test_a_batch_allocates_nothing_before_the_kv_cache_of_the_last_one_is_gone(
    checkpoint: Checkpoint, policy: str
) -> None:
    caches = []
    device = LaggingDevice(checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True)
    device.tell = lambda what, done, whole: caches.append(
        sum(isinstance(each, BlockedKV) for each in gc.get_objects())
    )
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            generated(device, policy, {}, keep_open=True)
    finally:
        gc.enable()
        device.close()
    assert len(caches) >= 3 and set(caches) == {0}

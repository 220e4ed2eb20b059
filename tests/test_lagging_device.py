"""The lagging device: CUDA's code path gives the bits of the CPU, in whatever order its streams run."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from _small_runs import TWO_MEMORIES, Generated, generate, same_bits

from moesched.devices.lagging.device import GPU_DEVICE, LaggingDevice, LaggingGpu
from moesched.devices.torch.device import TorchDevice
from moesched.devices.torch.kernels import group_by_expert
from moesched.devices.torch.kv_cache import BlockedKV
from moesched.models.checkpoint import Checkpoint
from moesched.models.tensor_parallel import cut_checkpoint, cut_config
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.transports.inproc import InprocTransport
from odd_models import MIXTRAL, PROMPTS, WIDE, layout_of, stored
from odd_runs import generated, two_batches
from policies_for_two_memories import POLICIES, STREAM_MOST

EVEN = msgspec.structs.replace(
    MIXTRAL, name="even", hidden=32, heads=4, kv_heads=2, head_dim=16, vocabulary=96
)
"""A model that can be cut in two."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return stored(MIXTRAL, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> Generated:
    device = TorchDevice(checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True, kernel="torch")
    return generated(device, "resident")


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
    assert device.gpu.operations.staged == 0, "copies take no memory of the GPU beside the plan's"
    assert device.gpu.operations.misaligned == 0, (
        "weights are where products are fast, wherever files have them"
    )


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def resident(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Generated]:
    """A number format of 16 bits, and what the CPU gives in it."""
    wide, dtype = stored(WIDE, tmp_path_factory.mktemp("models")), request.param
    return dtype, two_batches(partial(TorchDevice, kernel="torch"), wide, dtype, "resident", {}, 2.0)[0]


@pytest.mark.parametrize("policy", ["cgopipe", "expert_streaming"])
def test_a_policy_that_streams_has_the_bits_of_the_cpu_in_16_bits(
    tmp_path: Path, resident: tuple[str, Generated], policy: str
) -> None:
    dtype, expected = resident
    for found in two_batches(LaggingDevice, stored(WIDE, tmp_path), dtype, policy, {}, 0.8):
        assert found.streamed_pages > 0
        assert found.tokens == expected.tokens
        assert found.logits_RSV.equal(expected.logits_RSV)


def test_keys_and_values_of_sequences_of_one_length_are_loaded_in_whole_pieces(
    checkpoint: Checkpoint,
) -> None:
    gpu = LaggingGpu(seed=1)
    device = LaggingDevice(checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True, gpu=gpu)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    generate(device, make_policy("flexgen"), TWO_MEMORIES, prompts, new_tokens=3, micro_batch_size=3)
    assert gpu.operations.staged == 0


def test_grouping_the_rows_of_experts_waits_once_for_the_gpu() -> None:
    experts_Tk = torch.tensor([[0, 2], [1, 2], [2, 3], [0, 2]])
    with LaggingGpu(seed=1) as gpu:
        there = experts_Tk.to(GPU_DEVICE)
        before = gpu.streams.waits
        grouping = group_by_expert(there, 5)
        assert gpu.streams.waits == before + 1
        assert grouping.counts == [2, 1, 4, 1, 0]
        assert grouping.tokens_n.tolist() == [0, 3, 1, 0, 1, 2, 3, 2]
        assert grouping.rows_Tk.tolist() == [[0, 3], [2, 4], [5, 7], [1, 6]]


def test_likeliest_tokens_are_found_where_the_logits_are(checkpoint: Checkpoint) -> None:
    """Without kept logits, nothing as large as the vocabulary comes to the host."""
    keeping = LaggingDevice(checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True)
    tokens = generated(keeping, "cgopipe").tokens
    gpu = LaggingGpu(seed=1)
    device = LaggingDevice(checkpoint, layout_of(MIXTRAL, "float32"), gpu=gpu)
    batch = split_batch([len(prompt) for prompt in PROMPTS], 4, 2)
    plan = plan_run(
        TWO_MEMORIES, device.layout, batch, policy := make_policy("resident"), None, device.slot_bytes
    )
    assert run(plan, policy, device, PROMPTS).tokens == tokens
    assert gpu.operations.most_to_host <= 8 * MIXTRAL.experts < 4 * MIXTRAL.vocabulary


@pytest.mark.parametrize("seed", range(5))
def test_links_may_have_any_names(checkpoint: Checkpoint, expected: Generated, seed: int) -> None:
    links = [
        msgspec.structs.replace(link, path=f"wire {number}") for number, link in enumerate(TWO_MEMORIES.links)
    ]
    machine = msgspec.structs.replace(TWO_MEMORIES, links=links)
    device = LaggingDevice(
        checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True, gpu=LaggingGpu(seed=seed)
    )
    assert same_bits(generated(device, "cgopipe", machine=machine).logits_RSV, expected.logits_RSV)


def of_two_ranks(device: type[TorchDevice], folder: Path, **settings: Any) -> torch.Tensor:
    """The first rank's logits, step after step, of a model that is cut over two ranks of one process."""
    whole = stored(EVEN, folder)
    layout = layout_of(cut_config(EVEN, 2), "float32")
    transport = InprocTransport(2)
    ranks: list[Rank] = []
    batch = split_batch([len(prompt) for prompt in PROMPTS], 4, 2)
    for rank in range(2):
        made = device(cut_checkpoint(whole, rank, 2), layout, keep_logits=True, **settings)
        made.join(rank, transport, ranks[0].device if ranks else made)
        policy = make_policy("cgopipe")
        plan = plan_run(TWO_MEMORIES, layout, batch, policy, {"gpu": 300_000}, made.slot_bytes)
        ranks.append(Rank(plan, policy, made))
    first = ranks[0]
    run(first.plan, first.policy, first.device, PROMPTS, peers=ranks[1:])
    assert isinstance(first.device, device)
    return torch.cat(
        [torch.as_tensor(logits_SV) for _, logits_SV in sorted(first.device.logits, key=itemgetter(0))]
    )


def test_sums_over_two_ranks_have_the_bits_of_the_cpu(tmp_path: Path) -> None:
    expected = of_two_ranks(TorchDevice, tmp_path / "cpu", kernel="torch")
    for seed in (1, 2):
        found = of_two_ranks(LaggingDevice, tmp_path / f"gpu {seed}", gpu=LaggingGpu(seed=seed))
        assert same_bits(found, expected)


@pytest.mark.parametrize("policy", ["cgopipe", "flexgen", "layer_streaming"])
def test_batch_after_batch_takes_the_same_memory(checkpoint: Checkpoint, policy: str) -> None:
    def caches() -> int:
        return sum(isinstance(each, BlockedKV) for each in gc.get_objects())

    device = LaggingDevice(checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True)
    in_use, afterwards, before_allocating = [], [], []

    def tell(what: str, done: float, whole: float) -> None:
        if what == "allocating memory" and done == 0:  # looking through all objects takes long
            before_allocating.append(caches())

    device.tell = tell
    gc.collect()
    gc.disable()
    try:
        for _ in range(4):
            generated(device, policy, keep_open=True)
            in_use.append(device.gpu.memory.in_use())
            afterwards.append(caches())
    finally:
        gc.enable()
        device.close()
    # torch keeps frames of a process's first calls, and with them a few tensors.
    assert in_use[1:] == in_use[1:2] * 3
    assert afterwards[1:] == afterwards[1:2] * 3
    assert len(before_allocating) >= 4
    assert set(before_allocating) == {0}, "the KV cache of the last batch is gone"

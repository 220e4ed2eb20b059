"""The lagging device: CUDA's code path gives the bits of the CPU, in whatever order its streams run."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch
from _lagging_rows import SECONDS, errors
from _lagging_runs import CASES, LOCKED, WAYS, Case, Ended, Models, on_gpu, over_budget
from _lagging_runs import expected as expected_of_cpu
from _small_runs import TWO_MEMORIES, Generated, generate, same_bits

from moesched.devices.lagging.device import GPU_DEVICE, LaggingDevice, LaggingGpu
from moesched.devices.torch.device import TorchDevice
from moesched.devices.torch.kernels import group_by_expert
from moesched.devices.torch.kv_cache import BlockedKV
from moesched.models.checkpoint import Checkpoint
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from odd_models import MIXTRAL, PROMPTS, WIDE, layout_of, stored
from odd_runs import generated, two_batches
from policies_for_two_memories import POLICIES

pytestmark = pytest.mark.usefixtures("one_thread")

SINGLE = [name for name, way in WAYS.items() if way.nodes == 1]
IN_TURN = [
    next(case for case in CASES if case.policy == policy and case.way in SINGLE[number % len(SINGLE) :])
    for number, (policy, _) in enumerate(POLICIES)
]
OVER_NODES = [case for case in CASES if case.way == "two nodes"][::3]
EACH = list(enumerate(IN_TURN + OVER_NODES))
"""Each policy once, in one way and by one seed; the benchmark has all ways and many seeds."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models.stored(tmp_path_factory.mktemp("all"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return stored(MIXTRAL, tmp_path_factory.mktemp("models"))


KNOWN: dict[str, Ended] = {}


def expected_of(models: Models, case: Case) -> Ended:
    """What the CPU gives, once for all policies whose bits are the same."""
    key = case.name if WAYS[case.way].nodes > 1 else case.way
    if key not in KNOWN:
        KNOWN[key] = expected_of_cpu(models, case)
    return KNOWN[key]


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> Generated:
    device = TorchDevice(checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True, kernel="torch")
    return generated(device, "resident")


@pytest.mark.parametrize(("seed", "case"), EACH, ids=str)
def test_two_batches_of_every_policy_have_the_bits_of_the_cpu_and_keep_to_the_plan(
    models: Models, seed: int, case: Case
) -> None:
    way = WAYS[case.way]
    gpu = LaggingGpu(seed=seed, count=way.ranks)
    team = on_gpu(models, way, gpu)
    wanted = expected_of(models, case)
    for _ in range(2):
        ended = team.run(case.policy, case.settings)
        assert ended.has_bits_of(wanted)
        assert [*over_budget(ended, gpu, way.nodes)] == []
    team.close()
    if case.policy in LOCKED:
        assert gpu.operations.blocked == 0, "copies through page-locked memory make no thread wait"
    assert gpu.operations.staged == 0, "copies take no memory of the GPU beside the plan's"
    assert gpu.operations.misaligned == 0, "weights are where products are fast, wherever files have them"


@pytest.mark.parametrize("case", [CASES[2], OVER_NODES[0]], ids=str)
def test_an_error_of_the_gpu_ends_a_run_with_its_story_and_leaves_nothing(case: Case) -> None:
    answer = errors(case, 0, 2)
    assert answer["problems"] == []
    assert answer["slowest_seconds"] < SECONDS


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
    assert gpu.operations.blocked == 0, "the cache is page-locked"


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


@pytest.mark.parametrize("seed", range(2))
def test_links_may_have_any_names(checkpoint: Checkpoint, expected: Generated, seed: int) -> None:
    links = [
        msgspec.structs.replace(link, path=f"wire {number}") for number, link in enumerate(TWO_MEMORIES.links)
    ]
    machine = msgspec.structs.replace(TWO_MEMORIES, links=links)
    device = LaggingDevice(
        checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True, gpu=LaggingGpu(seed=seed)
    )
    assert same_bits(generated(device, "cgopipe", machine=machine).logits_RSV, expected.logits_RSV)


@pytest.mark.parametrize("policy", ["cgopipe", "flexgen"])
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

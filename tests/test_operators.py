"""The operators of a decode step: by their references they keep the table's promises, and give the CPU's tokens."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from msgspec.structs import replace

from benchmarks.shared.small_runs import TWO_MEMORIES, Generated, same_bits
from moesched.devices.kernels.check import check_kernel, cpu_resources
from moesched.devices.kernels.layer_weights import Weights
from moesched.devices.kernels.resources import host_upload
from moesched.devices.kernels.seam import Bound, Case
from moesched.devices.kernels.triton_attention_rows import TritonAttention, TritonAttentionInputs
from moesched.devices.kernels.triton_kernel import TritonKernel
from moesched.devices.kernels.triton_rows import (
    GROUPED_BYTES,
    TritonCombine,
    TritonEmbed,
    TritonExpert,
    TritonLogits,
    TritonOutputProjection,
    TritonRoute,
)
from moesched.devices.kernels.workspace import Workspace
from moesched.devices.lagging.device import LaggingDevice, LaggingGpu
from moesched.devices.torch.captured import identities
from moesched.devices.torch.device import TorchDevice
from moesched.devices.torch.kv_cache import BlockedKV
from moesched.machines.launches import launches
from moesched.models.checkpoint import Checkpoint
from moesched.models.footprint import KEPT_ROWS
from moesched.models.kv_blocks import KV_BLOCK_TOKENS
from moesched.models.layout import weight_layout
from moesched.models.replayed import GRAPH_BYTES, PART_TOKENS
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.requests.sampling import Sampling
from moesched.runs.hardware import run
from moesched.runs.planning import as_used_by, plan_run
from moesched.tasks import Task
from odd_models import PROMPTS, WIDE, stored
from odd_runs import Choices, one_batch

MODEL = WIDE.varied(name="aligned", layers=4, heads=4, kv_heads=2, head_dim=24, experts=5, window=4)
PAGE_BYTES = 14_000
"""Matrices come in several row blocks."""
AT_ENDS = 2
"""Launches or replays at the begin and the end of a step."""


@pytest.mark.parametrize(
    "row",
    [TritonAttentionInputs, TritonOutputProjection, TritonRoute, TritonExpert, TritonCombine, TritonLogits],
)
def test_a_row_keeps_the_promises_of_the_table(row: type[TritonKernel]) -> None:
    class OnHost(row):  # type: ignore[misc, valid-type]  # a class of the parameters
        def refusal(self, case: Case) -> str:
            refusal: str = super().refusal(case._replace(device="cuda"))
            return refusal

    assert check_kernel(OnHost, (1, 17)) > 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return stored(MODEL, tmp_path_factory.mktemp("models"))


def on_cpu(checkpoint: Checkpoint) -> TorchDevice:
    layout = weight_layout(checkpoint.config, "float32", PAGE_BYTES)
    return TorchDevice(checkpoint, layout, keep_logits=True, kernel="torch")


def on_gpu(checkpoint: Checkpoint, seed: int = 0, dtype: str = "float32") -> LaggingDevice:
    layout = weight_layout(checkpoint.config, dtype, PAGE_BYTES)
    return LaggingDevice(checkpoint, layout, keep_logits=True, gpu=LaggingGpu(seed=seed), triton=True)


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> Generated:
    return one_batch(on_cpu(checkpoint), "resident")


def test_operators_give_the_tokens_of_the_cpu(checkpoint: Checkpoint, expected: Generated) -> None:
    found = one_batch(on_gpu(checkpoint), "resident")
    assert found.tokens == expected.tokens
    assert found.logits_RSV.allclose(expected.logits_RSV, atol=1e-5)


@pytest.mark.parametrize(
    ("policy", "settings", "dtype"),
    [
        ("flexgen", {}, "bfloat16"),
        ("expert_streaming", {}, "float16"),
        ("moe_gen", {"kv_on_gpu": 1}, "bfloat16"),
    ],
)
def test_bits_depend_on_no_policy_and_no_number_of_rows(
    checkpoint: Checkpoint, policy: str, settings: dict[str, int], dtype: str
) -> None:
    resident = one_batch(on_gpu(checkpoint, dtype=dtype), "resident", size=4)
    device = on_gpu(checkpoint, seed=1, dtype=dtype)
    found = one_batch(device, policy, size=1, weights=0.8, settings=settings)
    assert found.tokens == resident.tokens
    assert same_bits(found.logits_RSV, resident.logits_RSV)


@pytest.mark.parametrize("policy", ["cgopipe", "expert_cache", "moe_gen"])
def test_operators_run_beside_attention_or_experts_on_the_host(
    checkpoint: Checkpoint, expected: Generated, policy: str
) -> None:
    device = on_gpu(checkpoint, seed=2)
    assert one_batch(device, policy, weights=0.8).tokens == expected.tokens
    assert device.gpu.operations.calls["attention_inputs"] >= 4 * MODEL.layers


def test_the_experts_of_long_prompts_run_in_parts(checkpoint: Checkpoint) -> None:
    tokens_of_a_part = GROUPED_BYTES // 4 // MODEL.routed.top_k
    prompts = [[1 + token % 90 for token in range(tokens)] for tokens in (3, tokens_of_a_part - 1, 5)]
    device = on_gpu(checkpoint)
    found, wanted = (
        one_batch(each, "resident", size=3, prompts=prompts, new_tokens=1).tokens
        for each in (device, on_cpu(checkpoint))
    )
    assert found == wanted
    calls = device.gpu.operations.calls
    assert calls["combine"] > calls["route"], "a part has a call of its own"


def test_sequences_that_grow_get_room_for_their_parts_and_blocks(tmp_path: Path) -> None:
    """The longer one has a second part in its fifth decode step, when a step is one replay."""
    model = MODEL.varied(layers=1, window=None)
    checkpoint = stored(model, tmp_path)
    prompts = [
        [1 + token % 90 for token in range(tokens)] for tokens in (PART_TOKENS - 4, 2 * KV_BLOCK_TOKENS - 2)
    ]
    devices = on_gpu(checkpoint, seed=3), on_cpu(checkpoint)
    found, wanted = (one_batch(each, "resident", size=1, prompts=prompts, new_tokens=8) for each in devices)
    assert found.tokens == wanted.tokens
    assert found.logits_RSV.allclose(wanted.logits_RSV, atol=1e-5)


def test_a_step_of_another_phase_begins_with_another_call() -> None:
    """The first call of a fixed step launches all others, which depend on the phase."""
    calls = []

    def recorded(run: Bound, operation: str, memory: Workspace) -> Bound:
        return lambda *arguments: calls.append(identities(arguments))

    resources = dataclasses.replace(cpu_resources(MODEL, torch.float32, None), captured=recorded)
    cache, memory = BlockedKV(MODEL, 4, block_size=4), Workspace(1)
    cache.table.open(0)
    embedding = Weights({"embedding": [torch.ones(MODEL.vocabulary, MODEL.hidden)]})
    embed = TritonEmbed(resources).bind(Case("embed", 1, frozenset(), "float32", "cpu"), embedding, memory)
    for memory.decodes in (False, True, True):
        step = cache.extend([0], [1])
        embed([5], step.positions, [step])
    prompt, decode, again = calls
    assert prompt != decode == again


def test_micro_batches_that_keep_no_memory_use_that_of_others_only_when_it_is_free(
    checkpoint: Checkpoint,
) -> None:
    prompts = [[1 + number % 90] for number in range(4 * (KEPT_ROWS + 1))]

    def tokens(device: TorchDevice) -> list[list[int]]:
        return one_batch(device, "cgopipe", size=KEPT_ROWS + 1, prompts=prompts, new_tokens=3).tokens

    wanted = tokens(on_cpu(checkpoint))
    for seed in (1, 2):
        assert tokens(on_gpu(checkpoint, seed)) == wanted


def test_layers_in_caches_with_other_blocks_have_tables_of_their_own() -> None:
    """A step attends in the first cache, in the second, and in the first again."""
    layer = MODEL.layer(0)
    case = Case("attention", 1, frozenset(), "float32", "cpu", layer, decodes=True)
    memory = Workspace(1)
    kernel = TritonAttention(cpu_resources(MODEL, torch.float32, None))
    layers = [kernel.bind(case, Weights(), memory) for _ in range(3)]
    caches = [BlockedKV(MODEL, 4, block_size=4) for _ in range(2)]
    for number, cache in enumerate(caches):
        cache.slots.normal_(generator=torch.Generator().manual_seed(number))
        cache.table.open(1, 8 * number)  # of another sequence
        cache.table.open(0)
        cache.extend([0], [2])
    heads = layer.grouped.heads, layer.grouped.kv_heads, layer.grouped.kv_heads
    qkv = [torch.ones(1, each, layer.grouped.head_dim) for each in heads]
    steps = [cache.extend([0], [1]) for cache in caches]
    attended = [
        attend(qkv, caches[of].at(0), steps[of]).clone() for attend, of in zip(layers, (0, 1, 0), strict=True)
    ]
    assert torch.equal(attended[0], attended[2])
    assert not torch.equal(attended[0], attended[1])


@pytest.mark.parametrize(
    ("policy", "size", "prompts"), [("layer_streaming", 16, [[1, 2, 3]] * 48), ("flexgen", 2, PROMPTS)]
)
def test_results_that_stay_and_what_kernels_share_are_in_the_plan(
    checkpoint: Checkpoint, policy: str, size: int, prompts: Sequence[Sequence[int]]
) -> None:
    device = on_gpu(checkpoint)
    machine = as_used_by(device, TWO_MEMORIES)
    batch = split_batch([len(prompt) for prompt in prompts], 4, size)
    plan = plan_run(machine, device.layout, batch, chosen := make_policy(policy), None, device.slot_bytes)
    run(plan, chosen, device, prompts)
    without_graphs = plan.memory("accelerator").used - plan.reservations.sizes.graphs
    assert device.gpu.memory.most_wanted <= without_graphs
    assert 0 < device.gpu.streams.captures * GRAPH_BYTES <= plan.reservations.sizes.graphs


def test_all_numbers_of_a_step_of_prompts_come_with_its_tokens_in_one_upload() -> None:
    uploads = []

    def upload(numbers: Sequence[int], into: torch.Tensor) -> None:
        uploads.append(numbers)
        host_upload(numbers, into)

    def refused(numbers: Sequence[int]) -> torch.Tensor:
        raise AssertionError("an upload of its own")

    resources = dataclasses.replace(cpu_resources(MODEL, torch.float32, None), indices=refused, upload=upload)
    cache, memory = BlockedKV(MODEL, 4, block_size=4, indices=refused), Workspace(5)
    for sequence in range(2):
        cache.table.open(sequence)
    step = cache.extend([0, 1], [2, 3])
    embedding = Weights({"embedding": [torch.ones(MODEL.vocabulary, MODEL.hidden)]})
    embed = TritonEmbed(resources).bind(Case("embed", 5, frozenset(), "float32", "cpu"), embedding, memory)
    embed(range(5), step.positions, [step])
    layer = MODEL.layer(0)
    case = Case("attention", 5, frozenset(), "float32", "cpu", layer)
    heads = layer.grouped.heads, layer.grouped.kv_heads, layer.grouped.kv_heads
    qkv = [torch.ones(5, each, layer.grouped.head_dim) for each in heads]
    attended = TritonAttention(resources).bind(case, Weights(), memory)(qkv, cache.at(0), step)
    assert attended.allclose(torch.ones(()))
    assert len(uploads) == 1


@pytest.mark.parametrize("policy", ["resident", "expert_streaming"])
def test_observers_see_the_choices_of_routers_in_order(checkpoint: Checkpoint, policy: str) -> None:
    seen = []
    for device in (on_gpu(checkpoint, seed=5), on_cpu(checkpoint)):
        choices = Choices()
        device.observe_routing(choices)
        one_batch(device, policy, weights=2.0 if policy == "resident" else 0.8)
        seen.append(choices.of)
    assert seen[0] == seen[1]
    assert len(seen[0]) == len(PROMPTS)


class Activations:
    """An observer of activations that keeps those of each layer, in order."""

    def __init__(self) -> None:
        self.of: defaultdict[int, list[npt.NDArray[np.float32]]] = defaultdict(list)

    def activated(self, layer: int, values_nI: npt.NDArray[np.float32]) -> None:
        self.of[layer].append(values_nI)


@pytest.mark.parametrize("policy", ["resident", "expert_streaming"])
def test_observers_see_the_activations_of_experts(checkpoint: Checkpoint, policy: str) -> None:
    seen = []
    for device in (on_gpu(checkpoint, seed=5), on_cpu(checkpoint)):
        device.observe_activations(activations := Activations())
        one_batch(device, policy, size=len(PROMPTS), weights=2.0 if policy == "resident" else 0.8)
        seen.append(activations.of)
    for layer in range(MODEL.layers):
        found, wanted = (np.sort(np.concatenate(of[layer]), axis=0) for of in seen)
        np.testing.assert_allclose(found, wanted, atol=1e-5)


class Counts(NamedTuple):
    """Counts of a run on the imitated GPU.

    Attributes:
        calls: operations that were queued, by name.
        drained: times that a thread waited for a stream to run empty, by the name of the thread.
        allocations: blocks of GPU memory that were allocated.
        launches: launches of kernels, and replays of graphs.
        predicted: those that a prediction counts.
        kernels: those that ran, by operation.
    """

    calls: Counter[str]
    drained: Counter[str]
    allocations: int
    launches: int
    predicted: float
    kernels: Mapping[str, Sequence[str]]


class PredictedLaunches:
    """An observer that counts the launches by which the cost model prices the accelerator's tasks."""

    def __init__(self) -> None:
        self.count = 0.0

    def ended(self, task: Task) -> None:
        if task.work.resource == TWO_MEMORIES.roles.accelerator:
            self.count += launches(task.work, replays=True)


def counts(
    checkpoint: Checkpoint,
    policy: str,
    new_tokens: int,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    sampling: Sampling | None = None,
    observer: Activations | None = None,
) -> Counts:
    gpu = LaggingGpu()
    device = LaggingDevice(checkpoint, weight_layout(MODEL, "float32", PAGE_BYTES), gpu=gpu, triton=True)
    if observer is not None:
        device.observe_activations(observer)
    sampling = sampling or Sampling(temperature=0)
    batch = split_batch([len(prompt) for prompt in prompts], new_tokens, len(prompts))
    batch = replace(batch, beams=sampling.beams)
    chosen = make_policy(policy)
    machine = as_used_by(device, TWO_MEMORIES)
    plan = plan_run(machine, device.layout, batch, chosen, None, device.slot_bytes)
    run(plan, chosen, device, prompts, sampling=sampling, observers=[predicted := PredictedLaunches()])
    return Counts(
        gpu.operations.calls,
        gpu.streams.drained,
        gpu.memory.allocations,
        gpu.operations.launches + gpu.streams.replays,
        predicted.count,
        device.kernels,
    )


@pytest.mark.parametrize(
    ("policy", "most"),
    [
        ("resident", 0),
        ("cgopipe", 2),
        ("fastdecode", 2),
        ("layer_streaming", 3),
        ("flexgen", 3),
        ("layer_split", 9),
    ],
)
def test_a_later_decode_step_allocates_nothing_waits_once_and_launches_or_replays_few_times_a_layer(
    checkpoint: Checkpoint, policy: str, most: int
) -> None:
    shorter, longer = (counts(checkpoint, policy, new_tokens) for new_tokens in (5, 6))
    assert longer.allocations == shorter.allocations
    assert longer.drained["lane accelerator"] == shorter.drained["lane accelerator"] + 1
    assert longer.launches - shorter.launches <= most * MODEL.layers + AT_ENDS
    assert longer.launches - shorter.launches == longer.predicted - shorter.predicted


@pytest.mark.parametrize(
    ("policy", "prompts"), [("expert_streaming", PROMPTS), ("resident", [[1]] * (KEPT_ROWS + 1))]
)
def test_steps_that_are_more_than_replays_have_the_launches_that_are_predicted(
    checkpoint: Checkpoint, policy: str, prompts: Sequence[Sequence[int]]
) -> None:
    shorter, longer = (counts(checkpoint, policy, new_tokens, prompts) for new_tokens in (5, 6))
    assert longer.launches - shorter.launches == longer.predicted - shorter.predicted


@pytest.mark.parametrize(
    ("sampling", "observer"),
    [
        (Sampling(temperature=0.8), None),
        (Sampling(temperature=0, beams=3), None),
        (Sampling(temperature=0), Activations()),
    ],
    ids=["temperature", "beams", "activations"],
)
def test_the_host_waits_once_a_step_whatever_is_sampled_or_observed(
    checkpoint: Checkpoint, sampling: Sampling, observer: Activations | None
) -> None:
    shorter, longer = (
        counts(checkpoint, "resident", new_tokens, sampling=sampling, observer=observer)
        for new_tokens in (4, 5)
    )
    assert longer.drained["lane accelerator"] == shorter.drained["lane accelerator"] + 1


def test_a_resident_decode_step_is_nothing_but_one_replay_and_one_copy_of_numbers(
    checkpoint: Checkpoint,
) -> None:
    before_a_block = KV_BLOCK_TOKENS - max(map(len, PROMPTS)) + 1
    shorter, longer = (
        counts(checkpoint, "resident", new_tokens) for new_tokens in (before_a_block, before_a_block + 1)
    )
    assert longer.calls - shorter.calls == {"view": 1, "__getitem__": 1}, "of the one memory for numbers"
    assert longer.kernels["replay"] == ["CUDA graphs of steps"]

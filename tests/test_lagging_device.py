"""The lagging device: CUDA's code path gives the bits of the CPU, in whatever order its streams run."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from benchmarks.robustness._lagging_rows import SECONDS, errors, ledger
from benchmarks.robustness._lagging_runs import (
    CASES,
    LOCKED,
    WAYS,
    Case,
    Ended,
    Models,
    Size,
    on_gpu,
    over_budget,
)
from benchmarks.robustness._lagging_runs import expected as expected_of_cpu
from benchmarks.shared.small_runs import TWO_MEMORIES, Generated, generate, same_bits
from moesched import plugins
from moesched.devices.lagging.device import LaggingDevice, LaggingGpu
from moesched.devices.runner.micro_batch import MicroBatchState
from moesched.devices.torch.device import TorchDevice
from moesched.devices.torch.kv_cache import BlockedKV
from moesched.models.checkpoint import Checkpoint
from moesched.models.config import ModelConfig
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from odd_models import GLM, GPT_OSS, GRANITE, MIXTRAL, PROMPTS, WIDE, coded, layout_of, stored
from odd_runs import kv_caches, one_batch, two_batches
from policies_for_two_memories import STREAM_MOST

RARE = ("whole prompts", "three nodes")
"""Ways that only `benchmarks/robustness/lagging_device.py` takes, which has all of them and many seeds."""


def in_turn() -> list[Case]:
    """A case of each policy with its settings, their ways in turn."""
    by_policy: dict[str, list[Case]] = {}
    for case in CASES:
        if case.way not in RARE:
            by_policy.setdefault(case.name.removesuffix(f", {case.way}"), []).append(case)
    return [cases[3 * number % len(cases)] for number, cases in enumerate(by_policy.values())]


EACH = in_turn()

NAMED = {case.name: case for case in CASES}
SHORT = Size(new_tokens=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[int, Models]:
    """Models by their number of layers."""
    return {layers: Models.stored(folder / f"{layers} layers", layers=layers) for layers in (2, 3)}


@pytest.fixture(scope="module")
def wanted(models: dict[int, Models]) -> Callable[[int, Case], Ended]:
    """Results of the CPU for a case with a model of some layers; cases of one way share them, but over nodes."""
    of_ways: dict[tuple[int, str], Ended] = {}

    def of(layers: int, case: Case) -> Ended:
        key = layers, case.name if WAYS[case.way].nodes > 1 else case.way
        if key not in of_ways:
            of_ways[key] = expected_of_cpu(models[layers], case, SHORT)
        return of_ways[key]

    return of


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> Generated:
    device = TorchDevice(checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True, kernel="torch")
    return one_batch(device, "resident")


def test_no_policy_and_no_way_is_left_out() -> None:
    assert {case.policy for case in EACH} == {case.policy for case in CASES} >= {*plugins.shipped_policies()}
    assert {case.way for case in EACH} == {case.way for case in CASES} - {*RARE}


@pytest.mark.parametrize(("seed", "case"), [*enumerate(EACH)], ids=str)
def test_two_batches_of_every_policy_have_the_bits_of_the_cpu_and_keep_to_the_plan(
    models: dict[int, Models], wanted: Callable[[int, Case], Ended], seed: int, case: Case
) -> None:
    way = WAYS[case.way]
    gpu = LaggingGpu(seed=seed, count=way.ranks)
    layers = 3 if case.policy in STREAM_MOST else 2  # slots would have room for all of two layers
    team = on_gpu(models[layers], way, gpu)
    for _ in range(2):
        ended = team.run(case.policy, case.settings, SHORT)
        assert ended.has_bits_of(wanted(layers, case))
        assert [*over_budget(ended, gpu, way.nodes)] == []
    team.close()
    assert gpu.pinned.faults == []
    assert ended.streamed_pages or case.policy not in STREAM_MOST
    if case.policy in LOCKED:
        assert gpu.operations.blocked == 0, "copies through page-locked memory make no thread wait"
    assert gpu.operations.staged == 0, "copies take no memory of the GPU beside the plan's"
    assert gpu.operations.misaligned == 0, "weights are where products are fast, wherever files have them"


@pytest.mark.parametrize("case", [NAMED["cgopipe, whole prompts"], NAMED["ep_naive, two nodes"]], ids=str)
def test_an_error_of_the_gpu_ends_a_run_with_its_story_and_leaves_nothing(case: Case) -> None:
    answer = errors(case, 0, 1)
    assert answer.problems == []
    assert answer.most["seconds"] < SECONDS


@pytest.mark.parametrize("policy", ["resident", "layer_split"])
def test_a_gpu_suffices_whose_free_memory_gives_just_the_plan(policy: str) -> None:
    assert ledger(NAMED[f"{policy}, whole prompts"], 0, 1).problems == []


@pytest.mark.parametrize(("dtype", "policy"), [("bfloat16", "cgopipe"), ("float16", "expert_streaming")])
def test_a_policy_that_streams_has_the_bits_of_the_cpu_in_16_bits(
    tmp_path: Path, dtype: str, policy: str
) -> None:
    wide = stored(WIDE, tmp_path)
    device = TorchDevice(wide, layout_of(wide.config, dtype), keep_logits=True, kernel="torch")
    expected = one_batch(device, "resident")
    for found in two_batches(LaggingDevice, wide, dtype, policy, {}, 0.8):
        assert found.streamed_pages > 0
        assert found.tokens == expected.tokens
        assert found.logits_RSV.equal(expected.logits_RSV)


def test_coded_weights_are_unpacked_with_the_same_bits_resident_and_streamed(tmp_path: Path) -> None:
    checkpoint = stored(coded("q4_k_m", layers=3), tmp_path)
    models, way, gpu = Models(checkpoint, checkpoint), WAYS["whole prompts"], LaggingGpu(seed=1)
    team, ran = on_gpu(models, way, gpu), []
    for policy in ("expert_streaming", "resident"):
        ran.append(team.run(policy, {}, SHORT))
        assert [*over_budget(ran[-1], gpu)] == []
    team.close()
    streamed, resident = ran
    assert streamed.streamed_pages > 0
    assert streamed.has_bits_of(resident)
    exact = expected_of_cpu(models, NAMED["resident, whole prompts"], SHORT).logits
    assert all(
        (logits - exact[sequence]).abs().max() <= 1e-5 * exact[sequence].abs().max()
        for sequence, logits in resident.logits.items()
    )


@pytest.mark.parametrize("policy", ["cgopipe", "cpu_ffn"])
@pytest.mark.parametrize("config", [GLM, GPT_OSS, GRANITE])
def test_layers_with_more_than_usual_have_the_bits_of_the_cpu(
    config: ModelConfig, policy: str, tmp_path: Path
) -> None:
    checkpoint = stored(config, tmp_path)
    models, way, gpu = Models(checkpoint, checkpoint), WAYS["whole prompts"], LaggingGpu(seed=1)
    team = on_gpu(models, way, gpu)
    ended = team.run(policy, {}, SHORT)
    team.close()
    assert ended.streamed_pages > 0
    assert [*over_budget(ended, gpu)] == []
    assert ended.has_bits_of(expected_of_cpu(models, NAMED["resident, whole prompts"], SHORT))


def test_keys_and_values_of_sequences_of_one_length_are_loaded_in_whole_pieces(
    checkpoint: Checkpoint,
) -> None:
    gpu = LaggingGpu(seed=1)
    device = LaggingDevice(checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True, gpu=gpu)
    prompts = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    generate(device, make_policy("flexgen"), TWO_MEMORIES, prompts, new_tokens=3, micro_batch_size=3)
    assert gpu.operations.staged == 0
    assert gpu.operations.blocked == 0, "the cache is page-locked"


def test_likeliest_tokens_are_found_where_the_logits_are(checkpoint: Checkpoint, expected: Generated) -> None:
    """Without kept logits, nothing as large as the vocabulary comes to the host, but the choices of routers."""
    gpu = LaggingGpu(seed=1)
    device = LaggingDevice(checkpoint, layout_of(MIXTRAL, "float32"), gpu=gpu)
    batch = split_batch([len(prompt) for prompt in PROMPTS], 4, 2)
    plan = plan_run(
        TWO_MEMORIES, device.layout, batch, policy := make_policy("resident"), None, device.slot_bytes
    )
    assert run(plan, policy, device, PROMPTS).tokens == expected.tokens
    choices = MIXTRAL.routed.top_k * sum(map(len, PROMPTS))
    assert gpu.operations.most_to_host <= 8 * choices < 4 * MIXTRAL.vocabulary


def test_links_may_have_any_names(checkpoint: Checkpoint, expected: Generated) -> None:
    links = [
        msgspec.structs.replace(link, path=f"wire {number}") for number, link in enumerate(TWO_MEMORIES.links)
    ]
    machine = msgspec.structs.replace(TWO_MEMORIES, links=links)
    device = LaggingDevice(
        checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True, gpu=LaggingGpu(seed=1)
    )
    assert same_bits(one_batch(device, "cgopipe", machine=machine).logits_RSV, expected.logits_RSV)


def test_a_micro_batch_keeps_no_queries_and_no_rows_of_experts_after_a_step(checkpoint: Checkpoint) -> None:
    device = LaggingDevice(checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True)
    one_batch(device, "resident", keep_open=True)
    states = [each for each in gc.get_objects() if type(each) is MicroBatchState]
    assert states
    assert not any(vars(state).keys() & {"qkv", "rows"} for state in states)
    device.close()


def keep_caches_in_a_cycle() -> None:
    """Do what torch does with frames of its first calls."""
    cycle: list[object] = [each for each in gc.get_objects() if type(each) is BlockedKV]
    cycle.append(cycle)


@pytest.mark.parametrize("policy", ["cgopipe", "flexgen"])
def test_batch_after_batch_takes_the_same_memory(checkpoint: Checkpoint, policy: str) -> None:
    device = LaggingDevice(checkpoint, layout_of(MIXTRAL, "float32"), keep_logits=True)
    in_use, afterwards, before_allocating = [], [], []

    def tell(what: str, done: float, whole: float) -> None:
        if what == "allocating memory" and done == 0:  # looking through all objects takes long
            before_allocating.append(kv_caches())

    device.tell = tell
    gc.collect()
    gc.freeze()  # so that each look is at the objects of these batches
    gc.disable()
    try:
        for _ in range(3):
            one_batch(device, policy, keep_open=True)
            in_use.append((device.gpu.memory.in_use(), device.gpu.memory.reserved))
            afterwards.append(kv_caches())
            keep_caches_in_a_cycle()
    finally:
        gc.enable()
        device.close()
    # torch keeps frames of a process's first calls, and with them a few tensors.
    assert in_use[1:] == in_use[1:2] * 2
    assert afterwards[1:] == afterwards[1:2] * 2
    assert len(before_allocating) >= 3
    assert set(before_allocating) == {0}, "the KV cache of the last batch is gone"

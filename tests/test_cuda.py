"""CUDA: every policy streams, in two batches, and gives the bits of the run where all weights stay. Needs a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

import moesched
from benchmarks.shared.small_runs import Generated
from moesched.devices.native.copy_team import CopyTeam
from moesched.devices.torch.compute import Compute
from moesched.devices.torch.copies import NumberRing, wait_for_copies
from moesched.devices.torch.cuda_device import CudaDevice
from moesched.devices.torch.cuda_streams import CudaStreams
from moesched.devices.torch.kv_cache import BlockedKV
from moesched.devices.torch.kv_offload import KVOffload
from moesched.devices.torch.locked_memory import locked_bytes
from moesched.devices.torch.registered_files import RegisteredFiles, spans_of
from moesched.devices.torch.staging_ring import StagingRing
from moesched.models.random_model import write_random_model
from moesched.seams import ignore_progress
from moesched.tasks import Kernel, Lane, Task
from moesched.work import Work
from odd_models import DBRX, MIXTRAL, PROMPTS, WIDE, layout_of, stored
from odd_runs import two_batches
from policies_for_two_memories import POLICIES, STREAM_MOST
from test_mapped_pages import linux

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[MIXTRAL, DBRX], ids=lambda config: config.name)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param.name
    return write_random_model(request.param, folder, seed=3, dtype="float32")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]] | None:
    return moesched.run_model(model, PROMPTS, max_new_tokens=6, micro_batch_size=2).tokens


@pytest.mark.parametrize(("policy", "settings"), POLICIES)
def test_every_policy_gives_the_tokens_of_the_cpu(
    model: Path, expected: list[list[int]], policy: str, settings: Mapping[str, int]
) -> None:
    report = moesched.run_model(
        model, PROMPTS, policy=policy, settings=settings, max_new_tokens=6, micro_batch_size=2, device="cuda"
    )
    assert report.tokens == expected


@pytest.mark.parametrize("policy", ["resident", "expert_streaming"])
def test_a_decode_step_in_triton_is_replayed_and_gives_the_tokens_of_the_cpu(
    tmp_path: Path, policy: str
) -> None:
    model = write_random_model(WIDE, tmp_path / "model", seed=3, dtype="float32")
    expected = moesched.run_model(model, PROMPTS, max_new_tokens=9, micro_batch_size=2).tokens
    report = moesched.run_model(
        model,
        PROMPTS,
        policy=policy,
        max_new_tokens=9,
        micro_batch_size=2,
        device="cuda",
        device_settings={"triton": True},
    )
    assert report.tokens == expected
    assert "triton" in report.kernels["attention"]
    assert ("CUDA graphs of steps" in report.kernels["replay"]) is (policy == "resident")


@pytest.mark.parametrize("triton", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        (policy, {"kv_on_gpu": 1} if policy == "moe_gen" else settings)
        for policy, settings in POLICIES
        if policy in STREAM_MOST - {"cpu_ffn"}
    ],
)
def test_a_policy_that_streams_gives_the_bits_of_the_run_where_all_weights_stay(
    tmp_path: Path, triton: bool, dtype: str, policy: str, settings: Mapping[str, int]
) -> None:
    if dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this GPU has no bfloat16")
    if policy == "moe_gen" and not triton:
        pytest.skip("it joins rows of micro-batches, and the bits of torch's products depend on their number")

    def batches(policy: str, settings: Mapping[str, int], weights: float) -> Sequence[Generated]:
        model = stored(WIDE, tmp_path / policy)
        return two_batches(partial(CudaDevice, triton=triton), model, dtype, policy, settings, weights)

    (resident, _) = batches("resident", {}, 2.0)
    for found in batches(policy, settings, 0.8):
        assert found.streamed_pages > 0
        assert found.tokens == resident.tokens
        computes_on_the_cpu = policy in ("cgopipe", "flexgen_cpu", "layer_split", "three_tiers")
        assert computes_on_the_cpu or found.logits_RSV.equal(resident.logits_RSV)


def test_numbers_pass_the_ring_to_the_gpu_again_and_again() -> None:
    device = torch.device("cuda:0")
    ring = NumberRing(device, numbers=64)
    with torch.cuda.stream(torch.cuda.Stream()):
        there = [ring.indices(range(start, start + 40)) for start in range(200)]
        wait_for_copies(device)
    assert all(each.tolist() == [*range(start, start + 40)] for start, each in enumerate(there))


def test_new_keys_and_values_come_to_the_hosts_cache_in_pieces() -> None:
    config, device = MIXTRAL, torch.device("cuda:0")
    compute = Compute("cuda:0", layout_of(config, "float32"), "torch", pin=False, threads=None)
    cache = BlockedKV(config, 40, block_size=16)
    cache.table.open(0)
    step = cache.extend([0], [600])
    keys_TKd = torch.randn(600, config.attention.kv_heads, config.attention.head_dim)
    with torch.cuda.stream(torch.cuda.Stream()):
        there = keys_TKd.to(device), -keys_TKd.to(device)
        KVOffload(config, 600, compute, piece_bytes=4096).write(cache.at(1), step, *there)
    keys, values = cache.slots[1, :, step.slots_T]
    assert keys.equal(keys_TKd) and values.equal(-keys_TKd)
    compute.close()


def test_memory_that_cuda_locked_is_page_locked_for_torch() -> None:
    memory = locked_bytes(3 << 20, torch.device("cuda:0"))
    assert memory.is_pinned() and memory[4096:].is_pinned()
    there = memory.fill_(7).to("cuda", non_blocking=True)
    assert there.sum().item() == 7 * (3 << 20)


@linux
def test_the_gpu_copies_from_a_file_in_the_page_cache(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes(bytes([1, 2]) * (3 << 20))
    files, spans = RegisteredFiles(2, torch.device("cuda:0")), spans_of([(file, 0, 6 << 20)])
    files.keep(spans)
    files.register(spans, ignore_progress)
    memory = files[file].bytes
    assert memory.is_pinned() and memory[4096:].is_pinned()
    assert memory[1 << 20 :].to("cuda", non_blocking=True).sum().item() == 3 * (5 << 19)
    torch.cuda.synchronize()
    files.close()
    assert not memory.is_pinned()


def test_the_gpu_gets_what_went_through_the_staging_ring() -> None:
    team = CopyTeam(4)
    ring = StagingRing(1 << 20, team, torch.device("cuda:0"))
    numbers = torch.arange(40 << 20, dtype=torch.int32).view(torch.uint8)
    target = torch.empty_like(numbers, device="cuda")
    ring.copy([(numbers, 0)], target)
    assert target.cpu().equal(numbers)
    team.close()


def test_events_are_used_again_and_edges_hold_all_the_same() -> None:
    total = torch.zeros(1, device="cuda")
    device = torch.device("cuda:0")
    streams = CudaStreams(device, ("a", "b"), lambda task: total.add_(1).mul_(1.0))
    lanes = [Lane("a"), Lane("b")]
    before: list[Task] = []
    for number in range(12_000):
        task = Kernel(lanes[number % 2], Work("add", "gpu"), "add", id=number)
        issued = streams.issue(task, before)
        before = [task]
        if number % 64 == 0:
            issued.wait()
            start, end = issued.span()
            assert start <= end
    torch.cuda.synchronize()
    assert total.item() == 12_000

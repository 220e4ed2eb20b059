"""Every policy gives the same logits, to the bit: with one memory or two, whether lanes are threads or streams."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
from _small_runs import ONE_MEMORY, THREE_TIERS, TWO_MEMORIES, Generated, generate, same_bits

from moesched.devices.torch.device import TorchDevice
from moesched.devices.torch.kv_cache import BlockedKV
from moesched.drivers.lanes import LaneKind, Streams
from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.random_model import write_random_model
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.planning import plan_run
from moesched.tasks import Task
from test_streams import FakeStreams

# Odd sizes: float32 products of operands that lie otherwise in memory then differ in their last bits.
# The window is shorter than one of the prompts and longer than the others.
CONFIG = ModelConfig(
    name="mixtral",
    layers=3,
    hidden=30,
    intermediate=44,
    heads=5,
    kv_heads=1,
    head_dim=18,
    experts=4,
    top_k=2,
    vocabulary=97,
    norm_eps=1e-5,
    rope_theta=1e4,
    sliding_window=4,
    max_positions=256,
    tied_embeddings=False,
    stop_tokens=(),
    dtype="float32",
)
DBRX = msgspec.structs.replace(
    CONFIG,
    name="dbrx",
    layers=4,
    hidden=90,
    sliding_window=None,
    norm="layer",
    clip_qkv=0.2,
    form="dbrx",
    transposed_down=True,
)
OLMOE = msgspec.structs.replace(
    CONFIG,
    name="olmoe",
    layers=4,
    experts=7,
    top_k=4,
    hidden=90,
    sliding_window=None,
    qk_norm="projection",
    weights_sum_to_one=False,
    form="olmoe",
)
# Small pages hold a few rows each: matrices come in several blocks, those that lie transposed too.
PAGE_BYTES = {"mixtral": None, "dbrx": 12_000, "olmoe": 12_000}
# Every family, and both dtypes of matrices that lie as they are used and of those that lie transposed (DBRX).
MODELS = [(CONFIG, "float32"), (DBRX, "float32"), (DBRX, "bfloat16"), (OLMOE, "bfloat16")]
PROMPTS = [[5, 6, 7], [90], [1, 2, 3, 4, 5, 6, 7], [8, 9]]
POLICIES: list[tuple[str, dict[str, int]]] = [
    ("resident", {}),
    ("layer_streaming", {}),
    ("cgopipe", {}),
    ("expert_streaming", {}),
    ("fastdecode", {}),
    ("flexgen", {}),
    ("flexgen_cpu", {}),
    ("flexgen_synchronous", {}),
    ("three_tiers", {}),
]


class Streamed(TorchDevice):
    """The torch device with lanes that are streams, as on CUDA."""

    def __init__(self, checkpoint: Checkpoint, layout: WeightLayout, *, keep_logits: bool) -> None:
        super().__init__(checkpoint, layout, keep_logits=keep_logits)
        self.fake = FakeStreams(self.execute)

    @property
    def kinds(self) -> Mapping[str, LaneKind]:
        return {"accelerator": "stream", "host->gpu": "stream", "gpu->host": "stream"}

    @property
    def streams(self) -> Streams | None:
        return self.fake


def name_of(model: tuple[ModelConfig, str]) -> str:
    config, dtype = model
    return f"{config.name}, {dtype}"


@pytest.fixture(scope="module", params=MODELS, ids=name_of)
def model(request: pytest.FixtureRequest) -> tuple[ModelConfig, str]:
    """A model and the dtype of a run."""
    chosen: tuple[ModelConfig, str] = request.param
    return chosen


@pytest.fixture(scope="module")
def checkpoint(model: tuple[ModelConfig, str], tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    config, _ = model
    folder = tmp_path_factory.mktemp("models") / config.name
    return open_checkpoint(write_random_model(config, folder, seed=3, dtype="float32"))


@pytest.fixture(scope="module")
def layout(model: tuple[ModelConfig, str]) -> WeightLayout:
    config, dtype = model
    return weight_layout(config, dtype, PAGE_BYTES[config.name])


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint, layout: WeightLayout) -> Generated:
    device = TorchDevice(checkpoint, layout, keep_logits=True)
    return generate(device, make_policy("resident"), ONE_MEMORY, PROMPTS, new_tokens=4, micro_batch_size=2)


def with_adversaries() -> Iterator[Any]:
    """Every kind of device and machine with every policy, and with two adversaries that no other has."""
    seeds = itertools.count()
    for title, kind, machine in (
        ("one memory", TorchDevice, ONE_MEMORY),
        ("two memories", TorchDevice, TWO_MEMORIES),
        ("two memories, streams", Streamed, TWO_MEMORIES),
        ("three tiers", TorchDevice, THREE_TIERS),
    ):
        adversaries = [("adversarial", {"seed": next(seeds)}) for _ in range(2)]
        for policy, settings in [*POLICIES, *adversaries]:
            yield pytest.param(
                kind, machine, policy, settings, id="-".join([title, policy, *map(str, settings.values())])
            )


@pytest.mark.parametrize(("kind", "machine", "policy", "settings"), [*with_adversaries()])
def test_every_policy_gives_the_same_logits(
    checkpoint: Checkpoint,
    layout: WeightLayout,
    expected: Generated,
    kind: type[TorchDevice],
    machine: Machine,
    policy: str,
    settings: Mapping[str, int],
) -> None:
    device = kind(checkpoint, layout, keep_logits=True)
    got = generate(
        device,
        make_policy(policy, dict(settings)),
        machine,
        PROMPTS,
        new_tokens=4,
        micro_batch_size=2,
        weights=1.0 if policy == "resident" else 0.8,
    )
    assert got.tokens == expected.tokens
    assert same_bits(got.logits_RSV, expected.logits_RSV)
    if isinstance(device, Streamed):
        device.fake.close()


@pytest.mark.parametrize("policy", ["cgopipe", "flexgen"])
def test_prompts_of_one_length_give_the_same_logits(
    checkpoint: Checkpoint, layout: WeightLayout, policy: str
) -> None:
    prompts = [[5, 6, 7], [90, 1, 2], [3, 4, 5], [8, 9]]
    wanted, got = (
        generate(
            TorchDevice(checkpoint, layout, keep_logits=True),
            make_policy(name),
            machine,
            prompts,
            new_tokens=3,
            micro_batch_size=4,
            weights=weights,
        )
        for name, machine, weights in (("resident", ONE_MEMORY, 1.0), (policy, TWO_MEMORIES, 0.8))
    )
    assert same_bits(got.logits_RSV, wanted.logits_RSV)


def test_three_tiers_are_in_use_at_once(
    checkpoint: Checkpoint, layout: WeightLayout, expected: Generated
) -> None:
    seen = Origins()
    got = generate(
        TorchDevice(checkpoint, layout, keep_logits=True),
        make_policy("three_tiers"),
        THREE_TIERS,
        PROMPTS,
        new_tokens=4,
        micro_batch_size=2,
        weights=0.8,
        observers=[seen],
    )
    assert same_bits(got.logits_RSV, expected.logits_RSV)
    assert seen.pins == {"disk->pinned", "host->pinned"}


class Origins:
    """Notes which way pages came to pinned memory."""

    def __init__(self) -> None:
        self.pins: set[str] = set()

    def ended(self, task: Task) -> None:
        if task.verb == "copy_to_pinned":
            self.pins.add(task.work.resource)


@pytest.mark.parametrize("model", [MODELS[0], MODELS[-1]], ids=name_of, indirect=True)
@pytest.mark.parametrize(
    ("policy", "weights"),
    [
        ("resident", (1.0, 1.0)),
        ("cgopipe", (0.8, 0.8)),
        ("layer_streaming", (0.8, 1.2, 0.8)),
        ("cgopipe", (1.2, 0.8, 1.2)),
    ],
)
@pytest.mark.parametrize("machine", [ONE_MEMORY, TWO_MEMORIES], ids=["one memory", "two memories"])
def test_the_next_batch_finds_the_weights_that_stay(
    checkpoint: Checkpoint,
    layout: WeightLayout,
    expected: Generated,
    machine: Machine,
    policy: str,
    weights: tuple[float, ...],
) -> None:
    device = TorchDevice(checkpoint, layout, keep_logits=True)
    read = []
    for share in weights:
        got = generate(
            device,
            make_policy(policy),
            machine,
            PROMPTS,
            new_tokens=4,
            micro_batch_size=2,
            weights=share,
            keep_open=True,
        )
        assert same_bits(got.logits_RSV, expected.logits_RSV)
        read.append(device.bytes_read)
    asyncio.run(device.aclose())
    if machine is TWO_MEMORIES and len(set(weights)) == 1:
        assert read[1] == read[0] > 0, "all weights are in one of the memories"


@pytest.mark.parametrize("model", MODELS[:1], ids=name_of, indirect=True)
@pytest.mark.parametrize("machine", [ONE_MEMORY, TWO_MEMORIES], ids=["one memory", "two memories"])
def test_a_batch_frees_the_kv_caches_of_the_one_before(
    checkpoint: Checkpoint, layout: WeightLayout, machine: Machine
) -> None:
    device = TorchDevice(checkpoint, layout, keep_logits=True)
    gc.collect()
    gc.disable()
    try:
        before = kv_caches()
        for _ in range(2):
            policy = make_policy("cgopipe")
            generate(device, policy, machine, PROMPTS, new_tokens=2, micro_batch_size=2, keep_open=True)
        assert kv_caches() - before == 1
        device.close()
        assert kv_caches() == before
    finally:
        gc.enable()


def kv_caches() -> int:
    """The number of KV caches that exist."""
    return sum(isinstance(each, BlockedKV) for each in gc.get_objects())


def test_a_model_that_does_not_fit_host_memory_is_refused(
    checkpoint: Checkpoint, layout: WeightLayout
) -> None:
    device = TorchDevice(checkpoint, layout)
    policy = make_policy("layer_streaming")
    batch = split_batch([3], 4, 1)
    with pytest.raises(BadInput, match="host"):
        plan_run(TWO_MEMORIES, device.layout, batch, policy, {"host": 10_000}, device.slot_bytes)

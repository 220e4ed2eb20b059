"""A machine with an accelerator's memory beside the host's: the same tokens, whether lanes are threads or streams.

The accelerator is the CPU with a memory of its own, so every copy between the two memories really happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from moesched.devices.torch_device import TorchDevice
from moesched.drivers.lanes import LaneKind, Streams
from moesched.errors import BadInput
from moesched.machines import Machine, parse_machine
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.layout import WeightLayout, weight_layout
from moesched.models.random_model import write_random_model
from moesched.plan import split_batch
from moesched.plugins import make_policy
from moesched.runs import plan_run, run
from test_streams import FakeStreams

MACHINE = b"""
name = "two memories"
memories.gpu = { capacity = "1GB", bandwidth = 1e11 }
memories.host = { capacity = "1GB", bandwidth = 1e10 }
memories.pinned = { capacity = "1GB", bandwidth = 1e10 }
processors.gpu = { memory = "gpu", flops = { float32 = 1e12, bfloat16 = 1e12 } }
processors.cpu = { memory = "host", flops = { float32 = 1e11, bfloat16 = 1e11 } }
links = [
    { source = "pinned", destination = "gpu", bandwidth = 1e9, path = "host->gpu" },
    { source = "host", destination = "gpu", bandwidth = 1e9 },
    { source = "gpu", destination = "host", bandwidth = 1e9 },
    { source = "host", destination = "pinned", bandwidth = 2e9 },
]
roles = { accelerator = "gpu", host = "cpu", weights = "host", pinned = "pinned" }
"""

CONFIG = ModelConfig(
    name="two-memories",
    layers=3,
    hidden=32,
    intermediate=48,
    heads=4,
    kv_heads=2,
    head_dim=8,
    experts=4,
    top_k=2,
    vocabulary=97,
    norm_eps=1e-5,
    rope_theta=1e4,
    sliding_window=None,
    max_positions=256,
    tied_embeddings=False,
    stop_tokens=(),
    dtype="float32",
)
PROMPTS = [[5, 6, 7], [8, 9], [1, 2, 3, 4, 5, 6, 7], [90], [11, 12], [13, 14, 15]]
POLICIES = [
    ("resident", {}),
    ("layer_streaming", {}),
    ("cgopipe", {}),
    *(("adversarial", {"seed": n}) for n in range(6)),
]


class Streamed(TorchDevice):
    """The torch device with lanes that are streams, as on CUDA."""

    def __init__(self, checkpoint: Checkpoint, layout: WeightLayout) -> None:
        super().__init__(checkpoint, layout)
        self.fake = FakeStreams(self.execute)

    @property
    def kinds(self) -> Mapping[str, LaneKind]:
        return {"accelerator": "stream", "host->gpu": "stream", "gpu->host": "stream"}

    @property
    def streams(self) -> Streams | None:
        return self.fake


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("models") / "model"
    write_random_model(CONFIG, folder, seed=3, dtype="float32")
    return open_checkpoint(folder)


@pytest.fixture
def machine() -> Machine:
    return parse_machine(MACHINE, "the test's machine")


def generate(
    checkpoint: Checkpoint,
    machine: Machine,
    device: TorchDevice,
    policy: str,
    settings: Mapping[str, int],
    gpu: int,
    *,
    keep_open: bool = False,
) -> list[list[int]]:
    chosen = make_policy(policy, dict(settings))
    batch = split_batch([len(prompt) for prompt in PROMPTS], 6, 2)
    plan = plan_run(machine, device.layout, batch, chosen, {"gpu": gpu}, device.slot_bytes)
    tokens = run(plan, chosen, device, PROMPTS, keep_open=keep_open).tokens
    assert tokens is not None
    return tokens


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> list[list[int]]:
    device = TorchDevice(checkpoint, weight_layout(CONFIG))
    return generate(checkpoint, parse_machine(MACHINE, "m"), device, "resident", {}, 10**9)


@pytest.mark.parametrize(("policy", "settings"), POLICIES)
@pytest.mark.parametrize("kind", [TorchDevice, Streamed])
def test_every_policy_gives_the_same_tokens(
    checkpoint: Checkpoint,
    machine: Machine,
    expected: list[list[int]],
    kind: type[TorchDevice],
    policy: str,
    settings: Mapping[str, int],
) -> None:
    device = kind(checkpoint, weight_layout(CONFIG))
    gpu = 10**9 if policy == "resident" else 600_000
    assert generate(checkpoint, machine, device, policy, settings, gpu) == expected
    if isinstance(device, Streamed):
        device.fake.close()


@pytest.mark.parametrize("policy", ["resident", "layer_streaming", "cgopipe"])
def test_the_next_batch_finds_the_weights_in_both_memories(
    checkpoint: Checkpoint, machine: Machine, expected: list[list[int]], policy: str
) -> None:
    device = TorchDevice(checkpoint, weight_layout(CONFIG))
    gpu = 10**9 if policy == "resident" else 600_000
    read = []
    for _ in range(2):
        assert generate(checkpoint, machine, device, policy, {}, gpu, keep_open=True) == expected
        read.append(device.bytes_read)
    asyncio.run(device.aclose())
    assert read[0] == read[1] > 0


@pytest.mark.parametrize("budgets", [(600_000, 900_000, 600_000), (900_000, 600_000, 900_000)])
def test_what_stays_may_change_from_batch_to_batch(
    checkpoint: Checkpoint, machine: Machine, expected: list[list[int]], budgets: tuple[int, ...]
) -> None:
    device = TorchDevice(checkpoint, weight_layout(CONFIG))
    for gpu in budgets:
        tokens = generate(checkpoint, machine, device, "layer_streaming", {}, gpu, keep_open=True)
        assert tokens == expected
    asyncio.run(device.aclose())


def test_a_model_that_does_not_fit_host_memory_is_refused(checkpoint: Checkpoint, machine: Machine) -> None:
    device = TorchDevice(checkpoint, weight_layout(CONFIG))
    policy = make_policy("layer_streaming")
    batch = split_batch([3], 4, 1)
    with pytest.raises(BadInput, match="host"):
        plan_run(machine, device.layout, batch, policy, {"host": 10_000}, device.slot_bytes)

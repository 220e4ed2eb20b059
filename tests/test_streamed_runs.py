"""Whole runs on lanes that are streams: the tokens are those of lanes that are threads. The streams are fakes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from moesched.devices.torch_device import CUDA_LANES, TorchDevice
from moesched.drivers.lanes import LaneKind
from moesched.machines import parse_machine
from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.layout import weight_layout
from moesched.plan import split_batch
from moesched.plugins import make_policy
from moesched.runs import plan_run, run
from small_models import small_model
from test_emulated_device import MACHINE
from test_streams import FakeStreams

PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10], [11, 12, 13], [14]]
NEW_TOKENS = 6


class Streamed(TorchDevice):
    """The torch device as if its accelerator were a GPU: three lanes are streams, tasks are issued ahead."""

    @property
    def kinds(self) -> Mapping[str, LaneKind]:
        return dict.fromkeys(CUDA_LANES, "stream")

    @property
    def streams(self) -> FakeStreams:
        return FakeStreams(self.execute)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(small_model(tmp_path_factory.mktemp("model")))


def tokens(checkpoint: Checkpoint, kind: type[TorchDevice], policy: str) -> list[list[int]] | None:
    layout = weight_layout(checkpoint.config, "float32")
    device = kind(checkpoint, layout)
    weights = layout.globals_bytes + sum(map(device.slot_bytes, layout.pages))
    made = make_policy(policy)
    batch = split_batch([len(prompt) for prompt in PROMPTS], NEW_TOKENS, 2)
    budgets = {} if policy == "resident" else {"gpu": weights}
    plan = plan_run(parse_machine(MACHINE, "test"), layout, batch, made, budgets, device.slot_bytes)
    return run(plan, made, device, PROMPTS).tokens


@pytest.mark.parametrize(
    "policy",
    ["cgopipe", "fastdecode", "flexgen", "flexgen_cpu", "layer_streaming", "expert_streaming", "resident"],
)
def test_every_policy_gives_the_tokens_of_threads(checkpoint: Checkpoint, policy: str) -> None:
    expected = tokens(checkpoint, TorchDevice, "resident")
    for _ in range(3):
        assert tokens(checkpoint, Streamed, policy) == expected

"""Expert parallelism over nodes, real: several nodes in one process give the tokens of one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from moesched.devices.torch_device import TorchDevice
from moesched.machines import Machine
from moesched.machines.local import unified_machine
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.parallel.ranks import Rank
from moesched.plan import split_batch
from moesched.plugins import make_policy
from moesched.runs import plan_run, run
from moesched.transports.inproc import InprocTransport
from reference import Reference, generate
from small_models import SMALL, small_model

MIXTRAL = msgspec.structs.replace(SMALL, layers=3, name="mixtral")
DBRX = msgspec.structs.replace(
    SMALL, layers=3, name="dbrx", form="dbrx", transposed_down=True, norm="layer", clip_qkv=8.0, rope_theta=5e5,
    experts=5, top_k=3,
)  # fmt: skip
MODELS = {config.name: config for config in (MIXTRAL, DBRX)}
PROMPTS = [[5, 6, 7], [8, 9], [1, 2, 3, 4, 5, 6, 7], [90], [11, 12]]
NEW_TOKENS = 4
POLICIES = ["ep_naive", "ep_busy_full", "ep_router_aided"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes")
    for name, config in MODELS.items():
        small_model(folder / name, config=config)
    return folder


def machine() -> Machine:
    return unified_machine(
        "a node",
        memory=10**9,
        disk=10**10,
        flops={"float32": 1e11},
        memory_bandwidth=2e10,
        disk_bandwidth=1e9,
    )


def expected(directory: Path) -> list[list[int]]:
    """The reference's tokens, which must be far from any other ones to be compared."""
    tokens, logits = generate(Reference(directory), PROMPTS, NEW_TOKENS)
    first, second = logits.topk(2).values.unbind(-1)
    assert (first - second).min() > 1e-4
    return tokens


def run_nodes(
    directory: Path, policy: str, nodes: int, **settings: Any
) -> tuple[list[list[int]], list[TorchDevice]]:
    """The tokens of the first node, and the devices of all."""
    checkpoint = open_checkpoint(directory)
    layout = weight_layout(checkpoint.config, "float32")
    batch = split_batch([len(prompt) for prompt in PROMPTS], NEW_TOKENS, 2)
    transport = InprocTransport(nodes)
    ranks = []
    for node in range(nodes):
        device = TorchDevice(checkpoint, layout, keep_logits=True)
        made = make_policy(policy, settings)
        plan = plan_run(machine(), layout, batch, made, slot_bytes=device.slot_bytes, nodes=nodes, node=node)
        ranks.append(Rank(plan, made, device))
        device.join(node, transport, ranks[0].device)
    first, *peers = ranks
    report = run(*first, PROMPTS, peers=peers)
    return report.tokens or [], [each.device for each in ranks]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_nodes_give_the_tokens_of_one_machine(folder: Path, model: str, policy: str, nodes: int) -> None:
    for decentralised in (True, False):
        tokens, devices = run_nodes(folder / model, policy, nodes, decentralised=decentralised)
        assert tokens == expected(folder / model)
        for other in devices[1:] if decentralised else ():
            for (_, mine), (_, theirs) in zip(devices[0].logits, other.logits, strict=True):
                assert torch.equal(mine, theirs)

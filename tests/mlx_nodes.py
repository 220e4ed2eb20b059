"""Two nodes of the MLX device in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.shared.small_runs import ONE_MEMORY
from moesched.devices.mlx.device import MlxDevice
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.layout import weight_layout
from moesched.models.rotary import Rotary
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.hardware import run
from moesched.runs.outcome import Report
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.transports.inproc import InprocTransport

TOY_DBRX: ModelConfig = SHAPES["mixtral-0.8b"].varied(
    name="dbrx", form="dbrx", transposed_down=True, norm="layer", clip=8.0, rotary=Rotary(theta=5e5),
    layers=40, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, experts=16, top_k=4, vocabulary=512,
    stop_tokens=(),
)  # fmt: skip
PROMPT = [5, 6, 7]
NODES = 2


def run_nodes(
    model: Path, new_tokens: int, settings: dict[str, Any], policy: str = "ep_router_aided"
) -> tuple[Report, list[MlxDevice]]:
    """The report of a run on two nodes, and their devices."""
    checkpoint = open_checkpoint(model)
    layout = weight_layout(checkpoint.config, "float32")
    batch = split_batch([len(PROMPT)], new_tokens, 1)
    transport = InprocTransport(NODES)
    ranks: list[Rank] = []
    devices: list[MlxDevice] = []
    for node in range(NODES):
        device, made = MlxDevice(checkpoint, layout, **settings), make_policy(policy, {})
        plan = plan_run(ONE_MEMORY, layout, batch, made, slot_bytes=device.slot_bytes, nodes=NODES, node=node)
        ranks.append(Rank(plan, made, device))
        devices.append(device)
        device.join(node, transport, ranks[0].device)
    first, *peers = ranks
    report = run(first.plan, first.policy, first.device, [PROMPT], peers=peers)
    return report, devices

"""Two nodes of the MLX device in one process, for mlx_evaluations.py: reads a case per line, prints its figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import torch
from _small_runs import ONE_MEMORY

from moesched.devices.mlx.device import MlxDevice
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.layout import weight_layout
from moesched.models.shapes import SHAPES
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.runs.hardware import run
from moesched.runs.outcome import Report
from moesched.runs.planning import plan_run
from moesched.runs.ranks import Rank
from moesched.transports.inproc import InprocTransport

TOY_DBRX: ModelConfig = SHAPES["mixtral-0.8b"].varied(
    name="dbrx", form="dbrx", transposed_down=True, norm="layer", clip=8.0, rope_theta=5e5,
    layers=40, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, experts=16, top_k=4, vocabulary=512,
    stop_tokens=(),
)  # fmt: skip
PROMPT = [5, 6, 7]
NODES = 2
CASES: dict[str, dict[str, Any]] = {
    "before": {},
    "every task": {"evaluate": "task"},
    "where needed": {"evaluate": "needed"},
}
"""Settings of the device."""


class CountedEvaluations:
    """Counts the calls of `mx.eval`, in trees whose device does not."""

    def __init__(self) -> None:
        self.count = 0
        self._eval = mx.eval
        mx.eval = self._counted

    def _counted(self, *arrays: Any) -> None:
        self.count += 1
        self._eval(*arrays)


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


def generate(model: Path, new_tokens: int, settings: dict[str, Any]) -> tuple[float, list[list[int]]]:
    """Seconds per decode step, and the tokens."""
    report, _ = run_nodes(model, new_tokens, settings)
    assert report.decode_tokens_per_second is not None
    return 1 / report.decode_tokens_per_second, report.tokens or []


def main() -> None:
    """Measure what standard input asks for: case and number of tokens."""
    torch.set_num_threads(1)
    model, counted = Path(sys.argv[1]), CountedEvaluations()
    for line in sys.stdin:
        case, new_tokens = json.loads(line)
        start = counted.count
        generate(model, 2, CASES[case])
        of_two = counted.count - start
        seconds, tokens = generate(model, new_tokens, CASES[case])
        of_all = counted.count - start - of_two
        evaluations = (of_all - of_two) / (new_tokens - 2) / NODES
        print(json.dumps({"seconds": seconds, "evaluations": evaluations, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()

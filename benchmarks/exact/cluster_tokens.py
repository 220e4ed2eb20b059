"""Processes on this machine, over ZeroMQ with CURVE: do they give one process's tokens, and each other's logits?

Every policy for several nodes, centralised and decentralised, on random models: Mixtral's and DBRX's form on torch and
on MLX; gpt-oss, GLM-4.5, MiniMax-M2 and Granite on torch. Tokens are compared with one process's on the same device as
far as the gap between its first and second logit exceeds 1e-4; logits of the nodes that compute any are compared to the
bit.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np

import moesched
from benchmarks.record.benchmark import Benchmark, track
from benchmarks.record.claims import Claim, Result, none_of
from benchmarks.shared.forked_nodes import ForkServer
from moesched.cli.logs import send_logs_to_stderr
from moesched.cluster.cluster_jobs import run_local
from moesched.models.config import ModelConfig
from moesched.models.random_model import write_random_model
from moesched.models.rotary import Rotary
from moesched.models.shapes import SHAPES
from odd_models import GLM, GPT_OSS, GRANITE, MINIMAX

GAP = 1e-4
PROMPTS = [[5, 6, 7], [8, 9], [1, 2, 3, 4, 5, 6, 7], [90]]
LOGGED = {
    "torch": "benchmarks.exact._logged_device:LoggedTorch",
    "mlx": "benchmarks.exact._logged_device:LoggedMlx",
}
DEVICES = tuple(LOGGED)
POLICIES = ("ep_naive", "ep_busy_full", "ep_router_aided", "ep_balanced")
NODES = (2, 3, 4)
NEW_TOKENS = 16


def claims(result: Result) -> Iterator[Claim]:
    """Processes against one process."""
    words = "runs of 2 to 4 processes with other tokens than one process"
    yield none_of(words, result["runs_that_differ"], result["runs"])


BENCHMARK = Benchmark(
    __file__,
    __doc__,
    claims=claims,
    parts=[f"{device}, {policy}" for device in DEVICES for policy in POLICIES],
    by_machine=False,
    rounds_help="run every case this often; all runs must agree",
)

MIXTRAL = SHAPES["mixtral-0.8b"].varied(
    name="mixtral", layers=4, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16,
    experts=8, top_k=2, vocabulary=512, stop_tokens=(),
)  # fmt: skip
DBRX = MIXTRAL.varied(
    name="dbrx", form="dbrx", transposed_down=True, norm="layer", clip=8.0, rotary=Rotary(theta=5e5), experts=16,
    top_k=4,
)  # fmt: skip
MODELS = dict.fromkeys((MIXTRAL, DBRX), DEVICES) | dict.fromkeys((GLM, GPT_OSS, GRANITE, MINIMAX), ("torch",))
"""The devices that run each model on several nodes."""


class Reference(NamedTuple):
    """One process's tokens, and how many of each request's may be compared: up to where two were about as likely."""

    tokens: list[list[int]]
    compared: list[int]


NO_REFERENCE = Reference([], [])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all cases, print what came out, write the result."""
    options = BENCHMARK.parse(arguments)
    os.environ.setdefault("MOESCHED_LOG", "error")
    send_logs_to_stderr()
    server = ForkServer()
    started = time.perf_counter()
    rows = []
    with TemporaryDirectory() as name:
        for config, devices in MODELS.items():
            model = Path(name) / config.name
            write_random_model(config, model, dtype="float32")
            for device in devices:
                chosen = [policy for policy in POLICIES if f"{device}, {policy}" in options.only]
                cases = [*product(NODES, chosen, (True, False))] * options.rounds
                reference = one_process(model, device) if cases else NO_REFERENCE
                for case in track(cases, f"{config.name}, {device}"):
                    rows.append(run_case(server, model, config, device, reference, *case))
    wrong = [row for row in rows if not (row["tokens_equal"] and row["logits_equal"])]
    return BENCHMARK.write(
        {
            "runs": len(rows),
            "runs_that_differ": len(wrong),
            "tokens_compared": sum(row["tokens_compared"] for row in rows),
            "seconds": round(time.perf_counter() - started, 1),
            "wrong": wrong,
        }
    )


def one_process(model: Path, device: str) -> Reference:
    """Tokens of one process, up to where its logits leave no doubt."""
    with TemporaryDirectory() as folder:
        report = moesched.run_model(
            model,
            PROMPTS,
            policy="resident",
            max_new_tokens=NEW_TOKENS,
            batch_size=len(PROMPTS),
            micro_batch_size=len(PROMPTS),
            device=LOGGED[device],
            device_settings={"folder": folder},
        )
        logits = np.load(Path(folder) / "0.npy")
    top = np.sort(logits, axis=-1)[:, -2:]
    clear = (top[:, 1] - top[:, 0] > GAP).reshape(NEW_TOKENS, len(PROMPTS))
    compared = [int(np.cumprod(clear[:, request]).sum()) for request in range(len(PROMPTS))]
    return Reference(report.tokens or [], compared)


def run_case(
    server: ForkServer,
    model: Path,
    config: ModelConfig,
    device: str,
    reference: Reference,
    nodes: int,
    policy: str,
    decentralised: bool,
) -> dict[str, Any]:
    """One run of several processes, held against one process's."""
    settings: dict[str, Any] = {"decentralised": decentralised}
    if policy == "ep_balanced":
        settings["experts"] = config.routed.experts // 2
    with TemporaryDirectory() as folder:
        report = run_local(
            model,
            PROMPTS,
            nodes=nodes,
            start=server,
            policy=policy,
            settings=settings,
            max_new_tokens=NEW_TOKENS,
            device=LOGGED[device],
            device_settings={"folder": folder},
        )
        logits = [np.load(file) for file in sorted(Path(folder).glob("*.npy"))]
    equal = [
        mine[:count] == whole[:count]
        for mine, whole, count in zip(report.tokens or [], reference.tokens, reference.compared, strict=True)
    ]
    return {
        "model": config.name,
        "device": device,
        "nodes": nodes,
        "policy": policy,
        "decentralised": decentralised,
        "tokens_equal": all(equal),
        "tokens_compared": sum(reference.compared),
        "nodes_with_logits": len(logits),
        "logits_equal": len(logits) == (nodes if decentralised else 1)
        and all(np.array_equal(logits[0], other) for other in logits),
    }


if __name__ == "__main__":
    sys.exit(main())

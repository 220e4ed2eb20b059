"""Runs of one model under many policies, one after the other in one process: how fast, as predicted, in which order."""

from __future__ import annotations

import gc
import hashlib
import json
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu._figures import expectation
from benchmarks.gpu._sizes import Requests
from moesched import run_model
from moesched.errors import MoeschedError

LONGER = 1.5
"""A case is begun if as many times the slowest one before it are left."""


class Case(NamedTuple):
    """Requests under a policy.

    gpu: bytes of the GPU's memory.
    """

    policy: str
    requests: Requests
    gpu: int


def in_turn(model: Path, device: str, machine: str, cases: Sequence[Case], seconds: float) -> dict[str, Any]:
    """The figures of each case that there was time for, and why others were left out.

    Args:
        machine: a file, or "auto".
        seconds: for all of them.
    """
    found: dict[str, Any] = {"cases": [], "left_out": {}}
    until, slowest = time.monotonic() + seconds, 0.0
    for case in cases:
        left = until - time.monotonic()
        if LONGER * slowest > left:
            found["left_out"][case.policy] = f"{left:.0f} s were left"
            continue
        begun = time.monotonic()
        try:
            found["cases"].append(_figures(model, device, machine, case))
        except (MoeschedError, torch.OutOfMemoryError) as error:
            found["left_out"][case.policy] = f"{type(error).__name__}: {error}".splitlines()[0]
        slowest = max(slowest, time.monotonic() - begun)
    return found


def _figures(model: Path, device: str, machine: str, case: Case) -> dict[str, Any]:
    requests = case.requests
    if torch.cuda.is_available():
        begin_peak(torch.cuda)
    report = run_model(
        model,
        list(_prompts(requests, vocabulary=_vocabulary(model))),
        policy=case.policy,
        device=device,
        machine=machine,
        budgets={"gpu": case.gpu},
        batch_size=requests.batch,
        micro_batch_size=requests.micro_batch,
        max_new_tokens=requests.new_tokens,
        expect=True,
    )
    told = report.as_dict()
    prefill, *steps = report.step_seconds
    return {
        "policy": case.policy,
        "total_seconds": sum(report.step_seconds),
        "first_token_seconds": prefill,
        "step_seconds": sum(steps) / len(steps) if steps else None,
        "lanes": {name: use["busy_seconds"] for name, use in told["lanes"].items()},
        "expected": expectation(told),
        "no_expectation": told.get("no_expectation"),
        "peak_bytes": {"planned": report.peak_bytes["gpu"], "allocated": _allocated()},
        "tokens": hashlib.sha256(json.dumps(report.tokens).encode()).hexdigest()[:16],
    }


def begin_peak(module: Any) -> None:
    """Have the peak of the GPU's memory begin anew, without what closed devices left there.

    module: that of the kind of GPU, such as torch.cuda.
    """
    gc.collect()
    module.empty_cache()
    module.reset_peak_memory_stats()


def _allocated() -> int | None:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def _vocabulary(model: Path) -> int:
    return int(json.loads((model / "config.json").read_text())["vocab_size"])


def _prompts(requests: Requests, vocabulary: int) -> Iterator[list[int]]:
    """The same for every policy."""
    chance = random.Random(requests.prompt)
    for _ in range(requests.total):
        yield [chance.randrange(vocabulary) for _ in range(requests.prompt)]

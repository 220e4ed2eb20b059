"""Rates of a CUDA GPU and its host, from a few seconds of copies and products."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

COPIED = 1 << 28
SMALL = 1 << 14
SIDE = 8192
HOST_SIDE = 2048
REPEATS = 5


class Rates(NamedTuple):
    """Limits of copies and products alone: bytes per second, seconds of a small copy, and FLOP/s by number format."""

    to_gpu: float
    ordinary_to_gpu: float
    to_host: float
    to_pinned: float
    latency: float
    gpu_memory: float
    host_memory: float
    gpu_flops: dict[str, float]
    host_flops: dict[str, float]


def rates(device: str = "cuda", copied: int = COPIED, side: int = SIDE, host_side: int = HOST_SIDE) -> Rates:
    """The rates of a device and its host.

    device: "cuda"; with "cpu" the code can be tried. copied: bytes of each copy. side: of square matrices.
    """
    locked = torch.ones(copied, dtype=torch.uint8, pin_memory=device == "cuda")
    there = torch.ones(copied, dtype=torch.uint8, device=device)
    ordinary, again = torch.ones(copied, dtype=torch.uint8), torch.empty_like(there)

    def rate(copy: Callable[[], object]) -> float:
        return copied / _seconds(copy, device)

    return Rates(
        to_gpu=rate(lambda: there.copy_(locked, non_blocking=True)),
        ordinary_to_gpu=rate(lambda: there.copy_(ordinary)),
        to_host=rate(lambda: locked.copy_(there, non_blocking=True)),
        to_pinned=rate(lambda: locked.copy_(ordinary)),
        latency=_seconds(lambda: there[:SMALL].copy_(locked[:SMALL], non_blocking=True), device),
        gpu_memory=2 * rate(lambda: again.copy_(there)),
        host_memory=rate(ordinary.view(torch.float64).sum),
        gpu_flops=_flops(device, side),
        host_flops=_flops("cpu", host_side),
    )


def _flops(device: str, side: int) -> dict[str, float]:
    reached = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        reached[name] = 2 * side**3 / _seconds(partial(torch.matmul, left, right), device)
    return reached


def _seconds(work: Callable[[], object], device: str) -> float:
    """Median seconds of one call, the GPU's work in it included."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    times = []
    for _ in range(REPEATS + 1):
        wait()
        start = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - start)
    return median(times[1:])

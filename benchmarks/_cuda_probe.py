"""A machine profile of a computer with a CUDA GPU, from what a few seconds of copies and products show."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from moesched.machines import Link, Machine, Processor, Roles, Tier
from moesched.system.memory import available_memory

COPIED = 1 << 28
SMALL = 1 << 14
SIDE = 8192
HOST_SIDE = 2048
REPEATS = 5


def probe(cap: int, pinned: int) -> Machine:
    """This computer.

    cap: bytes of the GPU's memory that may be used. pinned: bytes of page-locked memory.
    """
    gpu = torch.cuda.get_device_properties(0)
    locked = torch.ones(COPIED, dtype=torch.uint8, pin_memory=True)
    there = torch.ones(COPIED, dtype=torch.uint8, device="cuda")
    ordinary = torch.ones(COPIED, dtype=torch.uint8)
    to_gpu = _rate(lambda: there.copy_(locked, non_blocking=True))
    slow_to_gpu = _rate(lambda: there.copy_(ordinary))
    to_host = _rate(lambda: locked.copy_(there, non_blocking=True))
    to_pinned = _rate(lambda: locked.copy_(ordinary))
    latency = _seconds(lambda: there[:SMALL].copy_(locked[:SMALL], non_blocking=True))
    again = torch.empty_like(there)
    fast = 2 * _rate(lambda: again.copy_(there))
    slow = _rate(ordinary.view(torch.float64).sum)
    memory = Tier(capacity=available_memory() - pinned, bandwidth=slow)
    return Machine(
        name=gpu.name.lower().replace(" ", "-"),
        description="probed by copies and products",
        processors={
            "gpu": Processor(memory="gpu", flops=_flops("cuda", SIDE), launch_seconds=latency),
            "cpu": Processor(memory="host", flops=_flops("cpu", HOST_SIDE)),
        },
        memories={
            "gpu": Tier(capacity=cap, bandwidth=fast),
            "host": memory,
            "pinned": Tier(capacity=pinned, bandwidth=slow),
        },
        links=[
            Link(source="pinned", destination="gpu", bandwidth=to_gpu, latency=latency, path="host->gpu"),
            Link(source="host", destination="gpu", bandwidth=slow_to_gpu, latency=latency),
            Link(source="gpu", destination="host", bandwidth=to_host, latency=latency),
            Link(source="host", destination="pinned", bandwidth=to_pinned),
        ],
        roles=Roles(accelerator="gpu", host="cpu", weights="host", pinned="pinned"),
    )


def _flops(device: str, side: int) -> dict[str, float]:
    rates = {}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        rates[name] = 2 * side**3 / _seconds(lambda left=left, right=right: left @ right)  # type: ignore[misc]
    return rates


def _rate(copy: Callable[[], object]) -> float:
    return COPIED / _seconds(copy)


def _seconds(work: Callable[[], object]) -> float:
    """Median seconds of one call, the GPU's work in it included."""
    times = []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return median(times[1:])

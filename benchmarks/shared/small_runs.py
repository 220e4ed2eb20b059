"""Small models through a policy on real tensors, on a machine with one memory and on one with two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import torch

from moesched.devices.torch.device import TorchDevice
from moesched.machines import Link, Machine, Tier, parse_machine
from moesched.machines.local import unified_machine
from moesched.requests.batch import Batch, split_batch
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.seams import Observer, Policy
from moesched.steps.plan import Plan

if TYPE_CHECKING:
    from moesched.devices.mlx.device import MlxDevice

FLOPS = {"float32": 1e11, "bfloat16": 1e11}

ONE_MEMORY = unified_machine(
    "one memory", memory=10**9, disk=10**10, flops=FLOPS, memory_bandwidth=2e10, disk_bandwidth=1e9
)
_TWO = """
name = "two memories"
memories.gpu = { capacity = "1GB", bandwidth = 1e11 }
memories.host = { capacity = "1GB", bandwidth = 1e10 }
memories.pinned = { capacity = "1GB", bandwidth = 1e10 }
processors.gpu = { memory = "gpu", flops = { float32 = 1e12, bfloat16 = 1e12 } }
processors.cpu = { memory = "host", flops = { float32 = 1e11, bfloat16 = 1e11 } }
roles = { accelerator = "gpu", host = "cpu", weights = "host", pinned = "pinned" }
[[links]]
source = "pinned"
destination = "gpu"
bandwidth = 1e9
path = "host->gpu"
[[links]]
source = "host"
destination = "gpu"
bandwidth = 1e9
[[links]]
source = "gpu"
destination = "host"
bandwidth = 1e9
[[links]]
source = "host"
destination = "pinned"
bandwidth = 2e9
"""
# The accelerator is the CPU with a memory of its own, so every copy between the two memories really happens.
TWO_MEMORIES = parse_machine(_TWO.encode(), "the machine with two memories")


def _page_locked(machine: Machine) -> Machine:
    """The machine where all of the host's memory may be page-locked: copies to the GPU need no staging."""
    links = [link for link in machine.links if "pinned" not in (link.source, link.destination)]
    return msgspec.structs.replace(
        machine,
        name="page-locked memory",
        memories={name: memory for name, memory in machine.memories.items() if name != "pinned"},
        links=links,
        roles=msgspec.structs.replace(machine.roles, pinned=None),
    )


PAGE_LOCKED = _page_locked(TWO_MEMORIES)


def _with_disk(machine: Machine) -> Machine:
    """Weights come from the files; the host has room for the KV cache and for some of them."""
    disk = Tier(capacity=10**9, bandwidth=1e9)
    host = msgspec.structs.replace(machine.memories["host"], capacity=50_000)
    links = [
        Link(source="disk", destination=memory, bandwidth=1e9, path="disk")
        for memory in ("pinned", "host", "gpu")
    ]
    return msgspec.structs.replace(
        machine,
        name="three tiers",
        memories={**machine.memories, "host": host, "disk": disk},
        links=[*machine.links, *links],
        roles=msgspec.structs.replace(machine.roles, weights="disk"),
    )


THREE_TIERS = _with_disk(TWO_MEMORIES)


class Generated(NamedTuple):
    """Result of a run. logits_RSV: by request and step, in the run's dtype or float32."""

    tokens: list[list[int]]
    logits_RSV: torch.Tensor
    streamed_pages: int


def generate(
    device: TorchDevice | MlxDevice,
    policy: Policy,
    machine: Machine,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    micro_batch_size: int,
    weights: float = 2.0,
    observers: Sequence[Observer] = (),
    keep_open: bool = False,
) -> Generated:
    """Greedy tokens of each prompt, all in one batch. The device keeps logits.

    weights: the share of the weights that fast memory has room for beside all else.
    keep_open: whether the device is to run another batch.
    """
    device.logits.clear()
    batch = split_batch([len(prompt) for prompt in prompts], new_tokens, micro_batch_size)
    budgets = fast_memory(device, machine, batch, weights)
    plan = plan_run(machine, device.layout, batch, policy, budgets, device.slot_bytes)
    report = run(plan, policy, device, prompts, observers=observers, keep_open=keep_open)
    assert report.tokens is not None
    rows: dict[int, list[torch.Tensor]] = {}
    for requests, logits_SV in device.logits:
        for request, row in zip(requests, logits_SV, strict=True):
            rows.setdefault(request, []).append(torch.as_tensor(row))
    logits_RSV = torch.stack([torch.stack(rows[request]) for request in sorted(rows)])
    return Generated(report.tokens, logits_RSV, report.plan.streamed_pages)


def fast_memory(
    device: TorchDevice | MlxDevice, machine: Machine, batch: Batch, weights: float
) -> dict[str, int]:
    """A budget for all that must be in fast memory, and for a share of the weights."""
    plan = Plan(machine, device.layout, batch, slot_bytes=device.slot_bytes)
    plan.place_kv("accelerator")
    plan.check()
    fast = plan.memory("accelerator")
    return {fast.name: fast.used + int(weights * sum(map(device.slot_bytes, device.layout.pages)))}


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Test whether two tensors of numbers are equal to the bit: 0 is not -0."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))

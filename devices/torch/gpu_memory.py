"""The bytes of a GPU's memory that a plan may use, and a setting of torch's allocator."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from msgspec.structs import replace

from moesched.errors import BadInput, OutOfMemory
from moesched.machines import Machine
from moesched.steps.plan import Plan
from moesched.units import format_bytes

WORKSPACE_BYTES = 512_000_000
"""Bytes that plans leave to libraries and torch's allocator, in addition to a twentieth of the free bytes."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables that set torch's allocator."""


def usable_bytes(free: int) -> int:
    """Return the bytes of a GPU that a plan may use; the rest is for libraries and the allocator.

    free: bytes that are free on the GPU.

    Raises:
        BadInput: too few bytes are free.
    """
    usable = free - free // 20 - WORKSPACE_BYTES
    if usable <= 0:
        raise BadInput(
            f"device cuda: the GPU has {format_bytes(free)} free, less than its libraries need: end other programs "
            "that use it, which nvidia-smi lists"
        )
    return usable


def with_usable_memory(machine: Machine, free: int) -> Machine:
    """Return a machine's profile in which the accelerator has only the bytes of memory that a plan may use now.

    free: bytes that are free on the GPU.

    Raises:
        BadInput: too few bytes are free.
    """
    name = machine.accelerator.memory
    memory = machine.memories[name]
    capacity = min(memory.nbytes, usable_bytes(free))
    return replace(machine, memories={**machine.memories, name: replace(memory, capacity=capacity)})


def require_room(plan: Plan, device: torch.device) -> None:
    """Check that a GPU has the memory that a plan takes; memory that torch's allocator has reserved counts as free.

    Raises:
        OutOfMemory: the GPU has less memory than the plan takes.
    """
    module: Any = torch.get_device_module(device)
    free = module.mem_get_info(device)[0] + module.memory_reserved(device)
    memory, usable = plan.memory("accelerator"), usable_bytes(free)
    if memory.used > usable:
        raise OutOfMemory(
            f"out of memory: the plan takes {format_bytes(memory.used)} of the GPU, which has {format_bytes(usable)} "
            f"beside what its libraries need: give --budget {memory.name}={usable}, or end other programs that use it"
        )


def let_segments_grow(environment: Mapping[str, str] = os.environ) -> None:
    """Let torch's allocator use expandable segments, which leave no unusable gaps, unless the user has configured it.

    environment: the environment variables, by which users configure the allocator.
    """
    if not any(name in environment for name in ALLOCATOR_VARIABLES):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")

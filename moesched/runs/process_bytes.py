"""Resident memory of the process that runs a plan: predicted by its parts, and measured."""

from __future__ import annotations

import msgspec

from moesched.steps.plan import Plan
from moesched.steps.process import ALLOCATOR_BYTES
from moesched.system.memory import peak_resident_bytes


class ProcessBytes(msgspec.Struct, frozen=True, kw_only=True):
    """Peak resident memory of the process of a run, in bytes.

    Attributes:
        predicted: sum of the parts below, or the peak before the first batch if that is higher; None where an
            accelerator's driver takes memory of unknown size.
        measured: the peak since the process started; None for a prediction.
        limit: the user's limit; None if there is none.
        runtime: bytes before the first batch: Python, libraries, prompts. A simulation assumes them.
        plan: bytes of the plan: weights, KV cache and buffers.
        allocator: bytes that kernels have released, but the allocator keeps.
        kernels: bytes of the kernels' own code.
    """

    predicted: int | None
    measured: int | None
    limit: int | None
    runtime: int
    plan: int
    allocator: int
    kernels: int


def process_bytes_of(plan: Plan, *, measured: bool) -> ProcessBytes | None:
    """Return the memory of the process that ran a plan, or would run it; None where nothing is known.

    measured: whether the plan ran in this process; else it is a prediction.
    """
    process = plan.reservations.process
    if process is None or not (measured or process.whole):
        return None
    ranks = plan.layout.config.ranks
    planned = ranks * sum(memory.peak for memory in plan.memories.values())
    allocator = ranks * ALLOCATOR_BYTES
    total = max(process.runtime + planned + allocator + process.kernels, process.peak)
    return ProcessBytes(
        predicted=total if process.whole else None,
        measured=peak_resident_bytes() if measured else None,
        limit=process.limit,
        runtime=process.runtime,
        plan=planned,
        allocator=allocator,
        kernels=process.kernels,
    )


def largest(parts: list[ProcessBytes]) -> ProcessBytes | None:
    """Return the entry with the largest prediction; its `measured` is replaced by the highest one of all entries.

    Args:
        parts: an entry for each batch; without any, None is returned.
    """
    if not parts:
        return None
    most = max(parts, key=lambda each: each.predicted or 0)
    measured = [each.measured for each in parts if each.measured is not None]
    return msgspec.structs.replace(most, measured=max(measured, default=None))

"""Converts users' memory budgets to bytes; a budget is for a memory of the machine, or for the whole process."""

from __future__ import annotations

from collections.abc import Mapping

from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.steps.process import ALLOCATOR_BYTES, Process
from moesched.system.memory import total_memory
from moesched.units import format_bytes, parse_bytes

PROCESS = "process"
"""Name of the budget that limits a process's resident memory."""

ASSUMED_RUNTIME = 360_000_000
"""Bytes of a process apart from its plan, as predictions assume: Python, torch on the CPU, a tokenizer, kernels' code.

Measured with torch 2 on Linux: 300 MB, and 34 MB of code on processors with bfloat16 instructions; rounded up.
"""


def read_budgets(
    given: Mapping[str, int | str] | None, machine: Machine, *, here: bool = False, processes: int = 1
) -> dict[str, int]:
    """Convert budgets to bytes by memory, and check that each is within the capacity of its memory.

    Args:
        given: limits by memory, as bytes or texts such as "16GB"; None for none.
        here: whether the machine is this one, so that a budget of the host's memory may use all memory that this
            machine has, also where the machine's description states less.
        processes: number of processes on the machine, each of which gets these budgets.

    Raises:
        BadInput: a budget is more than the machine has, or both the process and the host's memory have a budget.
    """
    budgets = {memory: parse_bytes(size) for memory, size in (given or {}).items()}
    host = machine.host.memory
    capacities = {name: tier.nbytes for name, tier in machine.memories.items()}
    if here:
        capacities[host] = max(capacities[host], total_memory())
    capacities.setdefault(PROCESS, capacities[host])
    each = f" for each of {processes} processes" if processes > 1 else ""
    for name, nbytes in budgets.items():
        if name in capacities and processes * nbytes > capacities[name]:
            raise BadInput(
                f"--budget {name}={format_bytes(nbytes)}{each} is more than machine {machine.name} has, "
                f"{format_bytes(capacities[name])}: lower it, or omit it"
            )
    if PROCESS in budgets and host in budgets:
        raise BadInput(
            f"--budget limits both {PROCESS} and {host}, where {PROCESS} is {host} with Python and libraries: give one"
        )
    return budgets


def assumed_process(machine: Machine) -> Process:
    """Return the resident bytes that predictions assume for a process on a machine, without the memory of its plan."""
    return Process(runtime=ASSUMED_RUNTIME, whole=machine.unified)


def within_process(
    budgets: Mapping[str, int], machine: Machine, process: Process, ranks: int
) -> tuple[dict[str, int], Process]:
    """Replace a budget for the whole process by a budget for the host's memory.

    The new budget is what the process's limit leaves after Python, libraries, allocators, page-locked memory and the
    memory of an emulated accelerator. Without a budget for the process, the arguments are returned unchanged.

    Args:
        budgets: bytes for one rank, by name of memory. Under the name `PROCESS`, a rank's share of the bytes of the
            whole process.
        process: the bytes that the process takes for anything but plans; its `limit` is None.
        ranks: number of ranks in the process.

    Returns:
        The budgets by name of memory, in bytes for each rank; and `process` with its limit.

    Raises:
        BadInput: nothing is left for the host's memory, or an accelerator's driver takes an unknown part of the limit.
    """
    rest = {name: nbytes for name, nbytes in budgets.items() if name != PROCESS}
    if PROCESS not in budgets:
        return rest, process
    host, limit = machine.host.memory, budgets[PROCESS] * ranks
    if not process.whole:
        raise BadInput(
            f"--budget {PROCESS} cannot be kept on machine {machine.name}, whose accelerator has a driver and a memory "
            f"of its own: give {host} instead"
        )
    beside = process.runtime + process.kernels + ranks * ALLOCATOR_BYTES
    claims = {f"{format_bytes(beside)} for Python, libraries and what the allocator keeps": beside}
    for name in _memories_beside(machine):
        nbytes = rest.get(name, machine.memories[name].nbytes) * ranks
        claims[f"{format_bytes(nbytes)} for {name}"] = nbytes
    left = limit - sum(claims.values())
    if left <= 0:
        raise BadInput(
            f"--budget {PROCESS}={format_bytes(limit)} leaves nothing for weights, KV cache and buffers beside "
            f"{' and '.join(claims)}: give more than {format_bytes(limit - left)}"
        )
    return {**rest, host: left // ranks}, process._replace(limit=limit)


def _memories_beside(machine: Machine) -> list[str]:
    """Return the names of the memories, other than the host's, that take memory of the process.

    They are the memory of an emulated accelerator, and the page-locked memory.
    """
    roles = machine.roles
    named = [machine.accelerator.memory, *([roles.pinned] if roles.pinned else [])]
    return [name for name in named if name != machine.host.memory]

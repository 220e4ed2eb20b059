"""Converts a system's refusals of memory during a run to one error, which gives the bytes that the run's plan takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from moesched.errors import GPU_REFUSALS, OutOfMemory, memory_refusal
from moesched.steps.plan import Plan
from moesched.steps.reservations import Content
from moesched.units import format_bytes


@contextmanager
def memory_refusals(plan: Plan) -> Iterator[None]:
    """Turn errors within this context that mean a lack of memory into OutOfMemory, with the bytes that the plan takes.

    Such errors come from Python, torch and the system, also when a thread does not start, and from the dynamic linker.
    Other errors pass unchanged.
    """
    try:
        yield
    except Exception as error:
        reason = memory_refusal(error)
        if reason is None:
            raise
        raise OutOfMemory(_message(plan, reason)) from error


def plan_bytes(plan: Plan) -> dict[Content, int]:
    """Return the bytes that a plan takes in all memories, by what they hold: weights, KV cache, buffers."""
    found: dict[Content, int] = {"weights": plan.weights.reserved_bytes, "KV cache": 0, "buffers": 0}
    for reservation in plan.reservations.of(plan.declared):
        found[reservation.content] += reservation.nbytes
    ranks = plan.layout.config.ranks
    return {content: ranks * nbytes for content, nbytes in found.items()}


def _message(plan: Plan, reason: str) -> str:
    if reason in GPU_REFUSALS:
        gpu = plan.memory("accelerator")
        return (
            f"out of memory ({reason}): the plan takes {format_bytes(gpu.used)} of {gpu.name}: lower --budget "
            f"{gpu.name}=… or --batch-size, or end other programs that use the GPU, which nvidia-smi lists"
        )
    parts = plan_bytes(plan)
    listed = ", ".join(f"{content} {format_bytes(nbytes)}" for content, nbytes in parts.items())
    process = plan.reservations.process
    beside = f", beside {format_bytes(process.runtime)} of Python and libraries" if process else ""
    return (
        f"out of memory ({reason}): the plan takes {format_bytes(sum(parts.values()))} ({listed}){beside}: lower "
        "--budget or --batch-size, free some memory, or raise the limits of this process"
    )

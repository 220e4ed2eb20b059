"""Finds the bytes that a policy lacks for a single request, from the budgets with which its plan would just fit."""

from __future__ import annotations

from moesched.errors import BadInput
from moesched.planner.setting import UNLIMITED, Setting
from moesched.steps.plan import Plan

PRECISION = 0.01
"""Largest relative error of the missing bytes; a plan that takes the same bytes with any budget has no error."""


def missing_bytes(setting: Setting) -> dict[str, int]:
    """Return the bytes that each memory lacks for a plan of one request, by memory.

    The result is empty if the plan fits, or would not fit with any budget. The bytes of each memory are found with no
    limit to the other memories.
    """
    return {
        memory: lacking
        for memory in setting.machine.memories
        if (lacking := _lacking(setting, memory)) is not None and lacking > 0
    }


def _lacking(setting: Setting, memory: str) -> int | None:
    """Return the fewest bytes by which a memory's budget must grow for a plan of one request.

    The result is 0 if the plan fits already, and None if it does not fit with any budget of this memory.
    """
    budget = setting.capacity(memory)
    if _plan(setting, memory, budget) is not None:
        return 0
    roomy = _plan(setting, memory, UNLIMITED)
    if roomy is None:
        return None
    enough = roomy.memories[memory].peak
    if _plan(setting, memory, enough) is None:
        return None
    short = budget
    if _plan(setting, memory, enough - 1) is None:
        return enough - budget
    while enough - short > max(1, PRECISION * (enough - budget)):
        middle = (short + enough) // 2
        short, enough = (short, middle) if _plan(setting, memory, middle) else (middle, enough)
    return enough - budget


def _plan(setting: Setting, memory: str, budget: int) -> Plan | None:
    """Plan one request with `budget` bytes of one memory and no limit to the others; None if it does not fit."""
    budgets = dict.fromkeys(setting.machine.memories, UNLIMITED) | {memory: budget}
    try:
        return setting.plan(setting.batch(1, 1), budgets, setting.kv_on_gpu)[0]
    except BadInput:
        return None

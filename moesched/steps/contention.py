"""Contention: tests whether tasks on one lane of a plan slow tasks on other lanes down."""

from __future__ import annotations

from moesched.machines.sustained import is_rated
from moesched.steps.plan import Plan


def lanes_contend(plan: Plan) -> bool:
    """Test whether, on the plan's machine, a task on one lane slows down tasks on other lanes."""
    return devices_contend(plan) or host_contends(plan)


def devices_contend(plan: Plan) -> bool:
    """Test whether processors and links slow each other down.

    True if accelerator and host share a memory, if several stages share links, or if contention was measured.
    """
    return plan.machine.unified or len(plan.stages) > 1 or bool(plan.machine.contention)


def host_contends(plan: Plan) -> bool:
    """Test whether a plan's host computes with data in the memory that transfers to the accelerator also read.

    False if the machine's profile has measured costs. False, too, if the profile names no class of hardware for any
    processor: its rates are then taken as rates that are reached in full, not as peaks.
    """
    if not is_rated(plan.machine) or plan.machine.cost_table:
        return False
    attends = any("host" in roles for roles in plan.declared.kv_roles) and not plan.declared.kv_buffers
    return attends or plan.declared.experts_on_host

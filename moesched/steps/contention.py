"""Contention: tests whether a task on one lane of a plan slows down tasks on other lanes."""

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
    """Test whether computing on the host and transfers to the accelerator compete for the host's memory.

    They do if the host computes attention or runs experts. In two cases the result is False nevertheless: if the
    machine has measured costs, or if none of its processors has a class of device. Without such a class, the rates
    that the machine's profile states are taken to be reached in full, not to be peaks.
    """
    if not is_rated(plan.machine) or plan.machine.cost_table:
        return False
    attends = any("host" in roles for roles in plan.declared.kv_roles) and not plan.declared.kv_buffers
    return attends or plan.declared.experts_on_host

"""Chooses the cost model of a machine, which estimates the time of a task's work.

The roofline is the maximum of the times to compute and to move bytes, at the rates that kernels sustain. A calibrated
machine has measured times of operations. Work on a resource that the machine does not describe is refused.
"""

from __future__ import annotations

from moesched.machines.calibrated import Calibrated
from moesched.machines.cost_model import CostModel
from moesched.machines.gpu_cost import GpuCosts
from moesched.machines.machine import Machine
from moesched.machines.roofline import NO_LEVELS, Roofline
from moesched.machines.sustained import Levels


def cost_model(machine: Machine, dtype: str, levels: Levels = NO_LEVELS) -> CostModel:
    """Return a machine's cost model: one from its measured costs if it was calibrated, else its roofline.

    Args:
        dtype: dtype that the model computes in.
        levels: the figure, "low" or "high", that a group of rates uses of its estimates, by the group's name. Groups
            that are not named use the expected figure.

    Raises:
        BadInput: the accelerator has neither measured costs nor a rate in this dtype.
    """
    if not machine.cost_table:
        machine.peak(machine.roles.accelerator, dtype)  # refused before a run begins, not at its first task
        return Roofline(machine, dtype, levels)
    measured = Calibrated if machine.unified else GpuCosts
    return measured(machine, dtype, levels)

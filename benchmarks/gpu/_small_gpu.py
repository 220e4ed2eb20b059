"""The lagging device with a machine of its own, so that commands that run on a GPU can be tried on a CPU."""

from __future__ import annotations

from msgspec.structs import replace

from benchmarks.shared.small_runs import PAGE_LOCKED
from moesched.devices.lagging.device import LaggingDevice
from moesched.machines import Machine
from moesched.machines.machine import Staging


class SmallGpu(LaggingDevice):
    """A GPU in name; its rates are made up."""

    @staticmethod
    def machine(host: Machine) -> Machine:
        """The machine that `--machine auto` is."""
        return replace(PAGE_LOCKED, staging=Staging(bandwidth=2e9))

    @staticmethod
    def check_machine(machine: Machine) -> None:
        """Take any machine."""

"""Devices that imitate another machine's speed, and the quality of the imitation."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec


@runtime_checkable
class KeepsTime(Protocol):
    """A device that imitates another machine, and provides the clock of all times."""

    def clock(self) -> int:
        """Return the monotonic nanoseconds on the imitated machine's clock. Called from any thread."""


class Dilations(msgspec.Struct, frozen=True):
    """Real seconds that pass for each second of an emulated machine, in prefill and in decode."""

    prefill: float
    decode: float


class EmulatedLane(msgspec.Struct, frozen=True):
    """Quality of the emulation of one lane.

    Attributes:
        real_share: seconds of real work over the dilated seconds of the modelled work; below a third in a good
            emulation.
        overruns: tasks whose real work took more than a third of their dilated time.
        late: tasks whose real work took longer than their dilated time, so that they ended late.
        excess_seconds: total time that tasks took longer than modelled, in the emulated machine's time.
    """

    real_share: float
    overruns: int
    late: int
    excess_seconds: float


class Emulation(msgspec.Struct, frozen=True):
    """Quality of an emulation, in a report whose other times are those of the emulated machine.

    Attributes:
        dilation: real seconds for each second of the emulated machine.
        core_load: share of this machine's cores that the run kept busy, from 0 to 1.
        lanes: quality of the emulation of each lane, by the lane's name.
    """

    dilation: Dilations
    core_load: float
    lanes: dict[str, EmulatedLane]


@runtime_checkable
class Emulates(Protocol):
    """A device that slows itself down to another machine's speed."""

    def emulation(self) -> Emulation:
        """Compare real work with the emulated machine's time since `begin`. Called after a batch."""

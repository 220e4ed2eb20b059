"""Ranks of one run in one process: each has its own policy, plan and device; one driver drives all of them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

from moesched import plugins
from moesched.drivers.lanes import Clock, Execute
from moesched.errors import BadInput
from moesched.machines import Machine
from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import Page, WeightLayout
from moesched.models.tensor_parallel import cut_checkpoint
from moesched.runs.device_values import checked_slot_bytes
from moesched.seams import (
    CountsReads,
    Device,
    Emulates,
    HasOwnBytes,
    Issued,
    JoinsRanks,
    KeepsTime,
    Observer,
    Policy,
    Streams,
)
from moesched.settings import check_settings
from moesched.steps.plan import Plan
from moesched.steps.process import Process
from moesched.system.cores import CorePlan, DividesCores
from moesched.system.memory import peak_resident_bytes, resident_bytes
from moesched.system.own_loop import run_on_own_loop
from moesched.system.signals import signals_held
from moesched.tasks import Lane, Task

TRANSPORT = "inproc"


class Rank(NamedTuple):
    """One of the ranks or nodes that run a batch together.

    Attributes:
        plan: the rank's plan.
        policy: the rank's policy.
        hardware: the rank's device; None on the virtual clock.
    """

    plan: Plan
    policy: Policy
    hardware: Device | None = None

    @property
    def device(self) -> Device:
        """The rank's device; only for runs on hardware."""
        assert self.hardware is not None, "a rank on the virtual clock has no device"
        return self.hardware


class Devices(NamedTuple):
    """The open devices of all ranks in order; a single one if the model is not split."""

    all: list[Device]

    @property
    def first(self) -> Device:
        """Rank 0's device."""
        return self.all[0]

    @property
    def core_plan(self) -> CorePlan | None:
        """The first rank's division of the host's cores among threads; None if its device does not divide them."""
        return self.first.core_plan if isinstance(self.first, DividesCores) else None

    @property
    def bytes_read(self) -> int | None:
        """Bytes read so far from the checkpoint's files, by all devices that count them; None if no device counts."""
        counting = [device for device in self.all if isinstance(device, CountsReads)]
        return sum(device.bytes_read for device in counting) if counting else None

    def slot_bytes(self, page: Page) -> int:
        """Return the bytes of a page's slot: the most that any rank's device needs, since all ranks plan with one size.

        Raises:
            BadInput: a device gives no integer, or fewer bytes than `page.nbytes`.
        """
        return max(checked_slot_bytes(device, page) for device in self.all)


def process_of(devices: Sequence[Device], machine: Machine, ahead: int = 0) -> Process:
    """Measure the memory of this process before its first batch, when its devices are open and hold no weights.

    ahead: bytes that this process has already allocated for weights; `Process.runtime` leaves them out, while
        `Process.peak` includes them.
    """
    kernels = sum(device.own_bytes for device in devices if isinstance(device, HasOwnBytes))
    return Process(
        runtime=resident_bytes() - ahead,
        peak=peak_resident_bytes(),
        kernels=kernels,
        whole=machine.unified or isinstance(devices[0], Emulates),
    )


def clock_of(device: Device) -> Clock:
    """Return the clock of a run on a device: the device's own if it imitates another machine, else this process's."""
    return device.clock if isinstance(device, KeepsTime) else time.perf_counter_ns


@contextmanager
def open_devices(
    device: str | type[Device],
    settings: Mapping[str, Any] | None,
    checkpoint: Checkpoint,
    layout: WeightLayout,
) -> Iterator[Devices]:
    """Open a device for each rank of the layout's model; close them at the end, after all batches.

    Raises:
        BadInput: the model is cut over several ranks, and the device cannot be one of them (`JoinsRanks`).
    """
    ranks = layout.config.ranks
    with signals_held():
        cls = plugins.find("devices", device)
    name = plugins.name_of("devices", device)
    checked = check_settings(cls, f"device {name}", settings or {})
    opened: list[Device] = []
    if ranks == 1:
        with _closed_at_end(opened):
            opened.append(cls(checkpoint, layout, **checked))
            yield Devices(opened)
        return
    if not issubclass(cls, JoinsRanks):
        raise BadInput(f"device {name} cannot be one of {ranks} ranks: use --tensor-parallel 1")
    transport = plugins.find("transports", TRANSPORT)(ranks)
    with _closed_at_end([transport]), _closed_at_end(opened):
        for rank in range(ranks):
            joining = cls(cut_checkpoint(checkpoint, rank, ranks), layout, **checked)
            opened.append(joining)
            joining.join(rank, transport, opened[0])
        yield Devices(opened)


class _Closable(Protocol):
    async def aclose(self) -> None: ...


@contextmanager
def _closed_at_end(opened: Sequence[_Closable]) -> Iterator[None]:
    try:
        yield
    finally:
        with signals_held(), ExitStack() as closing:
            for each in reversed(opened):
                closing.callback(run_on_own_loop, each.aclose)


class OnDevices:
    """Runs each task on the device of its lane's rank.

    Args:
        lanes: the lanes of each rank.
    """

    def __init__(self, ranks: Sequence[Rank], lanes: Sequence[Iterable[Lane]]) -> None:
        self._execute: dict[Lane, Execute] = {}
        self._streams: dict[Lane, Streams | None] = {}
        for rank, own in zip(ranks, lanes, strict=True):
            streams = rank.device.streams
            for lane in own:
                self._execute[lane] = rank.device.execute
                self._streams[lane] = streams

    def execute(self, task: Task) -> Any:
        """Run a task on the device of its lane, and return its value."""
        return self._execute[task.lane](task)

    def issue(self, task: Task, after: list[Task]) -> Issued:
        """Issue a task to its lane's stream, after the tasks `after` on other streams of the device."""
        streams = self._streams[task.lane]
        assert streams is not None, "a lane of kind stream belongs to a device with streams"
        return streams.issue(task, after)


class OfLanes:
    """An observer that passes tasks on to another observer, but only those that ran on given lanes.

    Args:
        observer: gets the tasks.
        lanes: the lanes whose tasks are passed on.
    """

    def __init__(self, observer: Observer, lanes: Iterable[Lane]) -> None:
        self._observer = observer
        self._lanes = frozenset(lanes)

    def ended(self, task: Task) -> None:
        """Call the other observer's `ended` with this task, if the task ran on one of the lanes."""
        if task.lane in self._lanes:
            self._observer.ended(task)

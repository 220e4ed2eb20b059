"""Several ranks of one run in one process: each with a policy, a plan and a device of its own, one driver for all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import anyio

from moesched import plugins
from moesched.drivers.interrupts import interrupts_held
from moesched.drivers.lanes import Execute, Issued, Streams
from moesched.errors import BadInput
from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import Page, WeightLayout
from moesched.models.tensor_parallel import cut_checkpoint
from moesched.seams import Observer, Policy
from moesched.settings import check_settings
from moesched.steps.plan import Plan
from moesched.tasks import Lane, Task

TRANSPORT = "inproc"


class Rank(NamedTuple):
    """One of the ranks or nodes that run a batch together; on the virtual clock they have no device."""

    plan: Plan
    policy: Policy
    device: Any = None


class Devices(NamedTuple):
    """The open devices of all ranks, the first rank's first; one alone where the model is not cut."""

    all: list[Any]

    @property
    def first(self) -> Any:
        """The first rank's."""
        return self.all[0]

    @property
    def bytes_read(self) -> int | None:
        """What all of them read from the checkpoint's files so far; None where they do not count it."""
        if not hasattr(self.first, "bytes_read"):
            return None
        counts: list[int] = [device.bytes_read for device in self.all]
        return sum(counts)

    def slot_bytes(self, page: Page) -> int:
        """What a page takes in a slot, on every rank: shares lie differently in their files, plans are to be equal."""
        sizes: list[int] = [device.slot_bytes(page) for device in self.all]
        return max(sizes)


@contextmanager
def open_devices(
    name: str, settings: Mapping[str, Any] | None, checkpoint: Checkpoint, layout: WeightLayout
) -> Iterator[Devices]:
    """A device for each rank that the layout's model is cut for, closed at the end; they last for all batches.

    Raises:
        BadInput: the device cannot be one of several.
    """
    ranks = layout.config.ranks
    with interrupts_held():
        cls: Any = plugins.find("devices", name)
    checked = check_settings(cls, f"device {name}", settings or {})
    if ranks == 1:
        with _closed_at_the_end([cls(checkpoint, layout, **checked)]) as devices:
            yield Devices(devices)
        return
    if not hasattr(cls, "join"):
        raise BadInput(f"device {name} cannot be one of {ranks} ranks: use --tensor-parallel 1")
    transport = plugins.find("transports", TRANSPORT)(ranks)
    with _closed_at_the_end([transport]), _closed_at_the_end([]) as devices:
        for rank in range(ranks):
            devices.append(cls(cut_checkpoint(checkpoint, rank, ranks), layout, **checked))
            devices[rank].join(rank, transport, devices[0])
        yield Devices(devices)


@contextmanager
def _closed_at_the_end(opened: list[Any]) -> Iterator[list[Any]]:
    try:
        yield opened
    finally:
        with interrupts_held():
            for each in opened:
                anyio.run(each.aclose)


class OnDevices:
    """Runs each task on the device of its lane's rank.

    Args:
        lanes: those of each rank.
    """

    def __init__(self, ranks: Sequence[Rank], lanes: Sequence[Iterable[Lane]]) -> None:
        self._execute: dict[Lane, Execute] = {}
        self._streams: dict[Lane, Streams] = {}
        for rank, own in zip(ranks, lanes, strict=True):
            streams = rank.device.streams
            for lane in own:
                self._execute[lane] = rank.device.execute
                self._streams[lane] = streams

    def execute(self, task: Task) -> Any:
        """Run a task and return its value."""
        return self._execute[task.lane](task)

    def issue(self, task: Task, after: list[Task]) -> Issued:
        """Hand a task to its lane's stream."""
        return self._streams[task.lane].issue(task, after)


class OfLanes:
    """Tells an observer of the tasks of some lanes only."""

    def __init__(self, observer: Observer, lanes: Iterable[Lane]) -> None:
        self._observer = observer
        self._lanes = frozenset(lanes)

    def ended(self, task: Task) -> None:
        """Told of every task that ran."""
        if task.lane in self._lanes:
            self._observer.ended(task)

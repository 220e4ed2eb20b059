"""An accelerator that is not there: real tensors and real overlap, in slow motion, on a machine without a GPU.

Every task does its work on the torch device, with the accelerator's memory beside the host's, and then keeps its lane
until the emulated machine would have been done. So that two cores can play GPU, CPU and links at once, time is dilated:
real work is to take less than a third of each lane's time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from math import inf
from time import perf_counter, perf_counter_ns, process_time
from typing import Any, NoReturn

from moesched.drivers.lanes import LaneKind
from moesched.drivers.pricing import nanoseconds
from moesched.errors import BadInput
from moesched.machines import INTERCONNECT, Machine
from moesched.machines.cost import cost_model
from moesched.machines.local import available_memory
from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import Page, WeightLayout
from moesched.requests.sampling import Sampling
from moesched.runs.outcome import Dilations, EmulatedLane, Emulation
from moesched.seams import CostModel, Transport
from moesched.steps.plan import Plan
from moesched.tasks import Task
from moesched.units import format_bytes

from ..products.linear import Tensor
from ..products.team import usable_cores
from ..torch.device import TorchDevice
from .dilated_clock import DilatedClock
from .rehearsal import Rehearsed, rehearse

REAL_SHARE = 1 / 3
"""How much of a lane's dilated time its real work may take."""

REHEARSED_SHARE = 1 / 4
"""The same in the rehearsal, where nothing else of the run keeps the cores busy."""

REHEARSED_SHARE_OF_ONE = 1 / 2
"""And how much of its own time a kind of operation may take there."""

NEGLIGIBLE = 1 / 200
"""What operations may take beyond that, together, as a share of their lane's time: some are over in microseconds."""


class EmulatedDevice:
    """Imitates the accelerator and the links of any machine profile, in time that runs slower than ours.

    Args:
        dilation: real seconds for each second of the emulated machine; 0 for the least that leaves real work a third
            of each lane's time, found by a rehearsal for prefill and for decode.
        keep_logits: remember every step's logits, as the torch device does.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: WeightLayout,
        *,
        dilation: float = 0.0,
        keep_logits: bool = False,
    ) -> None:
        if dilation and not 1 <= dilation < inf:
            raise BadInput(
                f"device emulated: dilation is {dilation:g}: give 1 or more, or 0 to have it chosen"
            )
        self.layout = layout
        self._checkpoint = checkpoint
        self._torch = TorchDevice(checkpoint, layout, keep_logits=keep_logits)
        self._asked = dilation
        self._time = DilatedClock()
        self._leads = True
        self._cost: CostModel
        self._dilations = Dilations(1.0, 1.0)
        self._meters: dict[str, _Meter] = {}
        self._prefilling = 0
        self._since = (0.0, 0.0)

    @staticmethod
    def machine(host: Machine) -> NoReturn:
        """There is no machine of its own to plan on.

        Raises:
            BadInput: always, with what to name instead.
        """
        raise BadInput(
            "device emulated imitates another machine: name it with --machine, such as --machine t4"
        )

    @staticmethod
    def check_machine(machine: Machine) -> None:
        """Whether it can be emulated.

        Raises:
            BadInput: its accelerator has no memory of its own.
        """
        if machine.unified:
            raise BadInput(
                f"machine {machine.name} has one memory for accelerator and host, which device emulated does not "
                "imitate: use --device torch, or a machine such as t4"
            )

    @property
    def kinds(self) -> Mapping[str, LaneKind]:
        """Every lane is a worker thread."""
        return {}

    @property
    def streams(self) -> None:
        """There are none."""

    @property
    def logits(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """Every step's logits (S, V) by micro-batch, if they are kept."""
        return self._torch.logits

    @property
    def own_bytes(self) -> int:
        """Bytes beyond the plan, of the torch device."""
        return self._torch.own_bytes

    @property
    def bytes_read(self) -> int:
        """Bytes read from the checkpoint's files so far."""
        return self._torch.bytes_read

    def slot_bytes(self, page: Page) -> int:
        """Bytes that a page takes in a slot."""
        return self._torch.slot_bytes(page)

    def clock(self) -> int:
        """Nanoseconds of the emulated machine since `begin` returned."""
        return self._time.now()

    def join(self, rank: int, transport: Transport, first: EmulatedDevice) -> None:
        """Imitate one of several accelerators of one machine, in the time of the first of them."""
        self._torch.join(rank, transport, first)
        self._time = first._time
        self._leads = first is self

    def begin(self, plan: Plan, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Allocate all that the plan says, choose the dilation, and let the emulated machine's time begin.

        Of several ranks the first one chooses for all, and begins last.

        Raises:
            BadInput: the emulated memories do not fit the real one, or a token id is outside the vocabulary.
        """
        _require_memory(plan)
        self._cost = cost_model(plan.machine, plan.layout.dtype)
        if self._leads:
            self._dilations = self._choose_dilations(plan)
        self._torch.begin(plan, prompts, sampling)
        names = ["accelerator", "host", INTERCONNECT, *(link.lane for link in plan.machine.links)]
        self._meters = {name: _Meter() for name in names}
        self._prefilling = sum(bool(chunk.ends) for chunk in plan.chunks.values())
        self._since = perf_counter(), process_time()
        if self._leads:
            self._time.run(self._dilations.prefill)

    def execute(self, task: Task) -> Any:
        """Run one task on the calling thread and return when the emulated machine would have."""
        begun, dilation = self._time.now(), self._time.dilation
        start = perf_counter_ns()
        value = self._torch.execute(task)
        worked = (perf_counter_ns() - start) / dilation
        modelled = nanoseconds(task.work, self._cost)
        self._time.wait_until(begun + modelled)
        if task.step >= 0:
            self._meters[task.lane.name].add(worked, modelled, self._time.now() - begun)
        if self._leads and task.step == 0 and task.verb == "sample":
            self._count_prefilled()
        return value

    async def aclose(self) -> None:
        """Free what the torch device holds."""
        self._torch.close()

    def emulation(self) -> Emulation:
        """Real work compared with dilated time since `begin`, without loading."""
        wall, busy = self._since
        core_load = (process_time() - busy) / max(perf_counter() - wall, 1e-9) / usable_cores()
        lanes = {name: meter.result() for name, meter in self._meters.items() if meter.modelled}
        return Emulation(self._dilations, core_load, lanes)

    def _choose_dilations(self, plan: Plan) -> Dilations:
        if self._asked:
            return Dilations(self._asked, self._asked)
        rehearsed = rehearse(self._checkpoint, self.layout, plan, self._cost)
        prefill, decode = (
            plan.layout.config.ranks * least_dilation(rehearsed[kind]) for kind in ("prefill", "decode")
        )
        return Dilations(prefill, decode)

    def _count_prefilled(self) -> None:
        """Go on at the pace of decode when the last micro-batch is through its prompts; one lane samples them all."""
        self._prefilling -= 1
        if not self._prefilling:
            self._time.run(self._dilations.decode)


class _Meter:
    """Adds up one lane's tasks; nanoseconds of the emulated machine."""

    def __init__(self) -> None:
        self.worked = 0.0
        self.modelled = self.excess = self.overruns = self.late = 0

    def add(self, worked: float, modelled: int, taken: int) -> None:
        self.worked += worked
        self.modelled += modelled
        self.excess += taken - modelled
        self.overruns += worked > REAL_SHARE * modelled
        self.late += worked > modelled

    def result(self) -> EmulatedLane:
        return EmulatedLane(self.worked / self.modelled, self.overruns, self.late, self.excess / 1e9)


def least_dilation(rehearsed: Sequence[Rehearsed]) -> float:
    """The least dilation of three binary digits that leaves real work its share of each lane and each operation."""
    lanes: dict[str, list[Rehearsed]] = {}
    for each in rehearsed:
        lanes.setdefault(each.lane, []).append(each)
    dilations = ((4 + number % 4) / 4 * 2.0 ** (number // 4) for number in count())
    return next(each for each in dilations if all(_keeps_up(lane, each) for lane in lanes.values()))


def _keeps_up(lane: Sequence[Rehearsed], dilation: float) -> bool:
    modelled = sum(each.modelled for each in lane)
    real = sum(each.real for each in lane) / dilation
    beyond = sum(max(0.0, each.real / dilation - REHEARSED_SHARE_OF_ONE * each.modelled) for each in lane)
    return real <= REHEARSED_SHARE * modelled and beyond <= NEGLIGIBLE * modelled


def _require_memory(plan: Plan) -> None:
    needed = sum(memory.used for memory in plan.memories.values())
    free = available_memory()
    if needed > free:
        raise BadInput(
            f"device emulated: the plan takes {format_bytes(needed)} of machine {plan.machine.name}, and this machine "
            f"has {format_bytes(free)} of memory free: run a smaller model, or `moesched simulate`"
        )

"""The emulated device: runs a schedule on real tensors as a machine with an accelerator would, in slow motion.

The torch device does the work of each task on the CPU; tensors that would be in the accelerator's memory are in the
host's memory. The task then occupies its lane until the emulated machine would have finished it. Time is slowed down
(dilated) so far that real work takes less than a third of each lane's time. So two cores can imitate a GPU, a CPU and
the links between them at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from time import perf_counter_ns
from typing import Any, NoReturn

from moesched.drivers.pricing import nanoseconds
from moesched.errors import BadInput
from moesched.machines import INTERCONNECT, Machine
from moesched.machines.cost import cost_model
from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import Page, WeightLayout
from moesched.requests.sampling import Sampling
from moesched.seams import CostModel, Dilations, Emulation, LaneKind, Progress, Transport, ignore_progress
from moesched.steps.plan import Plan
from moesched.system.memory import available_memory
from moesched.tasks import Task
from moesched.units import format_bytes

from ..products.linear import Tensor
from ..torch.device import TorchDevice
from .dilated_clock import DilatedClock, Pace
from .dilation import choose_dilations
from .meters import Meters


class EmulatedDevice:
    """Imitates the accelerator and the links of any machine profile, in time that runs slower than real time.

    Args:
        dilation: real seconds for each second of the emulated machine. With 0, a rehearsal chooses one dilation for
            prefill and one for decode, so that real work will take less than a third of each lane's time.
        keep_logits: whether `logits` keeps the logits of all steps.
    """

    gives_scores = True

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
        self._asked = Dilations(dilation, dilation) if dilation else None
        self._time = DilatedClock()
        self._leads = True
        self.tell: Progress = ignore_progress
        self._cost: CostModel
        self._dilations = Dilations(1.0, 1.0)
        self._pace: Pace | None = None
        self._meters = Meters(())

    @staticmethod
    def machine(host: Machine) -> NoReturn:
        """Raise an error: the emulated device imitates other machines, so it has no machine of its own to plan for.

        Raises:
            BadInput: always; the message tells the user to name a machine.
        """
        raise BadInput(
            "device emulated imitates another machine: name it with --machine, such as --machine t4"
        )

    @staticmethod
    def check_machine(machine: Machine) -> None:
        """Check that a machine can be emulated.

        Raises:
            BadInput: the machine's accelerator computes from the host's memory instead of a memory of its own.
        """
        if machine.unified:
            raise BadInput(
                f"machine {machine.name} has one memory for accelerator and host, which device emulated does not "
                "imitate: use --device torch, or a machine such as t4"
            )

    @property
    def kinds(self) -> Mapping[str, LaneKind]:
        """The kinds of lanes (queues of tasks) by name: empty, so that all have the default kind, a worker thread."""
        return {}

    @property
    def streams(self) -> None:
        """None: this device has no streams, so that worker threads run all tasks."""

    @property
    def logits(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """A pair for each step of a micro-batch, if kept: the sequences' indices in the batch, and their logits.

        The logits have the shape (sequences, vocabulary).
        """
        return self._torch.logits

    @property
    def own_bytes(self) -> int:
        """Bytes of memory that the torch device uses in addition to those that the plan counts."""
        return self._torch.own_bytes

    @property
    def kernels(self) -> Mapping[str, Sequence[str]]:
        """The names of the kernels that ran so far, by the name of the operation that they compute."""
        return self._torch.kernels

    @property
    def bytes_read(self) -> int:
        """Bytes read from the checkpoint's files so far."""
        return self._torch.bytes_read

    def slot_bytes(self, page: Page) -> int:
        """Return the bytes that a page (a part of a layer's weights) takes in a slot (memory for one page)."""
        return self._torch.slot_bytes(page)

    def clock(self) -> int:
        """Nanoseconds on the clock of the emulated machine, which the first call of `begin` starts."""
        return self._time.now()

    def join(self, rank: int, transport: Transport, first: EmulatedDevice) -> None:
        """Make this device one of the emulated accelerators of one machine; all share the clock of `first`.

        Args:
            rank: the number of this accelerator, from 0.
            transport: carries exchanges between the accelerators.
            first: the device of rank 0.

        Raises:
            BadInput: the model is not cut over ranks, so each device would be a machine of its own (a node). Nodes have
                no common clock.
        """
        if self.layout.config.ranks == 1:
            raise BadInput(
                "device emulated imitates one machine, not several nodes: use --device torch, or `moesched simulate "
                "--nodes`"
            )
        self._torch.join(rank, transport, first)
        self._time = first._time
        self._leads = first is self

    def begin(self, plan: Plan, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Begin a batch of prompts (token ids): allocate the plan's memory, choose the dilation, and start the clock.

        Where several ranks emulate one machine, rank 0 chooses the dilation for all, and must call `begin` last.

        Raises:
            BadInput: the emulated memories together are larger than this machine's free memory, or a token id is
                outside the vocabulary.
        """
        _require_memory(plan)
        self._cost = cost_model(plan.machine, plan.layout.dtype)
        if self._leads:
            self._dilations = self._asked or choose_dilations(
                self._checkpoint, self.layout, plan, self._cost, self.tell
            )
        self._torch.tell = self.tell
        self._torch.begin(plan, prompts, sampling)
        self._meters = Meters(
            ["accelerator", "host", INTERCONNECT, *(link.lane for link in plan.machine.links)]
        )
        if self._leads:
            last_chunks = sum(bool(chunk.ends) for chunk in plan.chunks.values())
            self._pace = Pace(self._time, self._dilations, last_chunks)

    def rows_apart(self, rows: int) -> bool:
        """Test whether a row's bits are the same whatever the other rows are, in decode steps of up to `rows` rows."""
        return self._torch.rows_apart(rows)

    def execute(self, task: Task) -> Any:
        """Run a task on the calling thread; returns its value when the emulated machine would have finished it."""
        begun, dilation = self._time.now(), self._time.dilation
        start = perf_counter_ns()
        value = self._torch.execute(task)
        worked = (perf_counter_ns() - start) / dilation
        modelled = nanoseconds(task.work, self._cost)
        self._time.wait_until(begun + modelled)
        if task.step >= 0:
            self._meters.lanes[task.lane.name].add(worked, modelled, self._time.now() - begun)
        if self._pace is not None and task.phase == "prefill" and task.verb == "sample":
            self._pace.count_prefilled()
        return value

    async def aclose(self) -> None:
        """Close the torch device that does the work."""
        self._torch.close()

    def emulation(self) -> Emulation:
        """Compare real work with the emulated machine's time, over all tasks since `begin` except loading."""
        return self._meters.result(self._dilations)


def _require_memory(plan: Plan) -> None:
    needed = sum(memory.used for memory in plan.memories.values())
    free = available_memory()
    if needed > free:
        raise BadInput(
            f"device emulated: the plan takes {format_bytes(needed)} of machine {plan.machine.name}, and this machine "
            f"has {format_bytes(free)} of memory free: run a smaller model, or `moesched simulate`"
        )

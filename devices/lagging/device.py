"""The lagging device: runs the CUDA device's own code on the CPU, with imitated GPUs.

The imitated streams run their work late, and in any order that CUDA permits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from types import ModuleType
from typing import Any

import torch

from moesched.machines import Machine
from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import WeightLayout
from moesched.requests.sampling import Sampling
from moesched.seams import Transport
from moesched.steps.plan import Plan
from moesched.tasks import Task

from ..kernels.triton_rows import TRITON
from ..shared.verbs import Verb
from ..torch.cuda_device import CudaDevice
from ..torch.device import TorchDevice
from .graphs import GraphPool, LaggingGraph
from .memory import GpuMemory
from .streams import Gpu, LaggingEvent
from .tensors import DEVICE_TYPE, OnGpu, Operations, operate

GPU_DEVICE = torch.device(DEVICE_TYPE, 0)


class LaggingGpu:
    """One or several imitated GPUs on the CPU. A process has one such object at a time: a new object replaces it.

    Args:
        seed: seed of the random order in which work of different streams runs.
        fails_at: the number of the piece of work that fails, counted from 1; 0 for none.
        capacity: bytes of each GPU's memory; None for no limit.
        reported_free: bytes that a GPU reports as free.
        clock: returns the host's time in nanoseconds; the GPUs' clocks drift from it.
        count: number of GPUs.

    Attributes:
        streams: the streams of all GPUs, with their queues of work.
        memories: the memory of each GPU.
        pinned: the page-locked memory of the host.
        operations: runs or queues torch's calls on the GPUs' tensors, and counts them.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        fails_at: int = 0,
        capacity: int | None = None,
        reported_free: int = 2**40,
        clock: Callable[[], int] = perf_counter_ns,
        count: int = 1,
    ) -> None:
        self.streams = Gpu(seed, fails_at, clock)
        self.memories = [GpuMemory(self.streams, capacity) for _ in range(count)]
        self._mode: Any = OnGpu()  # torch gives its contexts no types
        self.operations = operate(self.streams, self.memories)
        self.pinned = self.operations.pinned
        _install(self.operations, reported_free)

    @property
    def memory(self) -> GpuMemory:
        """The memory of the first GPU."""
        return self.memories[0]

    def __enter__(self) -> LaggingGpu:
        """Let the calling thread make tensors on the imitated GPUs while the context lasts."""
        self._mode.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)


class LaggingDevice(TorchDevice):
    """Runs tasks with the CUDA device's code on imitated GPUs.

    Args:
        gpu: the imitated GPUs; None makes one GPU with seed 0. Devices for several ranks get the same object.
        kernel: the kernels on the host: "auto", "torch", or the name of an instruction set.
        triton: whether the kernels that device cuda runs in Triton are preferred to others. On the imitated GPUs,
            reference code in torch takes the place of Triton.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: WeightLayout,
        *,
        keep_logits: bool = False,
        map_files: bool = True,
        gpu: LaggingGpu | None = None,
        kernel: str = "torch",
        triton: bool = False,
    ) -> None:
        self.gpu = gpu or LaggingGpu()
        super().__init__(
            checkpoint,
            layout,
            accelerator=str(GPU_DEVICE),
            keep_logits=keep_logits,
            kernel=kernel,
            map_files=map_files,
        )
        self.replays = triton
        if triton:
            self._compute.kernels.front = TRITON
        self._warm_ups.on_thread = _stay_on_gpu

    @staticmethod
    def check_machine(machine: Machine) -> None:
        """Check that a machine has a GPU with a memory of its own.

        Raises:
            BadInput: the machine has no such GPU.
        """
        CudaDevice.check_machine(machine)

    def join(self, rank: int, transport: Transport, first: Any) -> None:
        """Make this device one of several ranks of a tensor-parallel model, or one of several nodes.

        Rank r uses the imitated GPU with number r; all nodes use the first GPU.

        Args:
            rank: number of this rank or node, from 0.
            transport: carries exchanges between the devices.
            first: the device with number 0 if it is in this process, otherwise this device.
        """
        super().join(rank, transport, first)
        if self.layout.config.ranks > 1:
            self._compute.accelerator = torch.device(DEVICE_TYPE, rank)

    def begin(self, plan: Plan, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        with OnGpu():
            super().begin(plan, prompts, sampling)
        self._stay_on_gpu()

    def serve(self, plan: Plan) -> None:
        with OnGpu():
            super().serve(plan)
        self._stay_on_gpu()

    def _stay_on_gpu(self) -> None:
        self._verbs = {name: _on_gpu(verb) for name, verb in self._verbs.items()}


def _stay_on_gpu() -> None:
    """Keep the calling thread in `OnGpu` until it ends, so that it can make tensors on the imitated GPU."""
    mode: Any = OnGpu()  # torch gives its contexts no types
    mode.__enter__()


def _on_gpu(verb: Verb) -> Verb:
    def run(task: Task) -> Any:
        with OnGpu():
            return verb(task)

    return run


def _install(operations: Operations, free: int) -> None:
    """Register the imitated GPUs with torch as a device type, whose module imitates functions of `torch.cuda`.

    Args:
        operations: carries out torch's calls on the GPUs' tensors.
        free: bytes that a GPU reports as free.
    """
    module = getattr(torch, DEVICE_TYPE, None)
    if module is None:
        module = ModuleType(f"torch.{DEVICE_TYPE}")
        torch._register_device_module(DEVICE_TYPE, module)
    gpu = operations.gpu

    def number(device: torch.device | None) -> int:
        return gpu.number if device is None or device.index is None else device.index

    def memory(device: torch.device | None) -> GpuMemory:
        return operations.memories[number(device)]

    vars(module).update(
        _is_in_bad_fork=lambda: False,
        manual_seed_all=lambda _: None,  # nothing here draws numbers
        Stream=lambda device=None: gpu.new_stream(number(device)),
        Event=partial(LaggingEvent, gpu),
        CUDAGraph=partial(LaggingGraph, gpu),
        graph_pool_handle=GraphPool,
        stream=gpu.on,
        set_stream=gpu.choose,
        current_stream=lambda device=None: gpu.current_of(number(device)),
        synchronize=lambda device=None: gpu.synchronize(number(device)),
        mem_get_info=lambda device=None: (free, free + memory(device).in_use()),
        cudart=lambda: operations.pinned,
        empty_cache=lambda: None,
        reset_peak_memory_stats=lambda device=None: memory(device).reset_peak(),
        max_memory_allocated=lambda device=None: memory(device).most_taken,
        memory_reserved=lambda device=None: memory(device).in_use(),
    )

"""A GPU that does nothing: CUDA's code path on streams, events and graphs whose calls return at once.

Tensors are on the host. The first calls of a kernel run there, and replays do nothing: what is left of a step is the
host's time to issue its tasks.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from time import perf_counter_ns
from types import ModuleType
from typing import Any

import torch

from benchmarks.shared.small_runs import ONE_MEMORY
from moesched.devices.kernels.resources import host_indices
from moesched.devices.kernels.seam import Case
from moesched.devices.kernels.triton_rows import TRITON
from moesched.devices.runner.micro_batch import MicroBatchState
from moesched.devices.torch.captured import Graphs
from moesched.devices.torch.cuda_streams import CudaStreams
from moesched.devices.torch.device import CUDA_LANES, TorchDevice
from moesched.devices.torch.fixed_steps import Replays
from moesched.models.checkpoint import open_checkpoint
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy
from moesched.requests.batch import split_batch
from moesched.requests.sampling import Sampling
from moesched.runs.hardware import run
from moesched.runs.planning import plan_run
from moesched.steps.plan import Plan

PROMPT = 16

IDLE = torch.device("privateuseone", 0)
"""The name that torch has for devices of others."""


class Stream:
    """A stream on which all work has ended."""

    def __init__(self, device: object = None) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def synchronize(self) -> None: ...


class Event:
    """An event that happens when it is recorded."""

    def __init__(self, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self._time = 0

    def record(self, stream: Stream | None = None) -> None:
        self._time = perf_counter_ns()

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end._time - self._time) / 1e6


class Graph:
    """A graph of nothing."""

    def capture_begin(self, pool: object = None, capture_error_mode: str = "") -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


def install() -> None:
    """Make the GPU known to torch, like `torch.cuda`."""
    module = ModuleType(f"torch.{IDLE.type}")
    vars(module).update(
        Stream=Stream,
        Event=Event,
        CUDAGraph=Graph,
        graph_pool_handle=object,
        stream=nullcontext,
        set_stream=lambda stream: None,
    )
    torch._register_device_module(IDLE.type, module)


class OnHost:
    """Takes cases of the host as if they were a GPU's."""

    def refusal(self, case: Case) -> str:
        """The reason of the kernel for a GPU."""
        reason: str = super().refusal(case._replace(device=IDLE.type))  # type: ignore[misc]  # of a mixed-in row
        return reason


class IdleDevice(TorchDevice):
    """Keeps tensors on the host, and issues tasks to the GPU's streams as the CUDA device does."""

    def __init__(self, folder: Path) -> None:
        checkpoint = open_checkpoint(folder)
        super().__init__(checkpoint, weight_layout(checkpoint.config, "float32"), kernel="torch")
        self._compute.kernels.front = [type(row.__name__, (OnHost, row), {}) for row in TRITON]
        self._compute.replays = Replays(Graphs(IDLE))
        # Another than the host's, so that caches count as the GPU's.
        self._compute.indices = partial(host_indices)

    def _open(self, plan: Plan, states: list[MicroBatchState], sampling: Sampling) -> None:
        for state in states:
            for cache in state.caches:
                cache.slots.zero_()  # nothing else fills them, and tokens have to be finite
        super()._open(plan, states, sampling)

    @property
    def kinds(self) -> Mapping[str, Any]:
        """Streams, as on CUDA."""
        return dict.fromkeys(CUDA_LANES, "stream")

    @property
    def streams(self) -> CudaStreams:
        """The issuer of tasks."""
        return CudaStreams(IDLE, CUDA_LANES, lambda task: self._verbs[task.verb](task))


def decode(folder: Path, new_tokens: int) -> list[float]:
    """Decode one sequence of a model, resident; returns the seconds of each step, for each of its tasks."""
    device = IdleDevice(folder)
    batch, policy = split_batch([PROMPT], new_tokens, 1), make_policy("resident")
    plan = plan_run(ONE_MEMORY, device.layout, batch, policy, None, device.slot_bytes)
    report = run(plan, policy, device, [[1] * PROMPT])
    tasks = report.tasks // new_tokens
    return [seconds / tasks for seconds in report.step_seconds]

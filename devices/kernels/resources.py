"""The resources that a torch device gives to each kernel: model, dtype, device, threads, functions of the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from moesched.models.config import ModelConfig

from ..native.kernels import NativeKernels
from ..products.team import Team
from .seam import Bound
from .table import KernelTable
from .workspace import Workspace

Indices = Callable[[Sequence[int]], torch.Tensor]
"""A function that makes an int64 tensor of numbers on the accelerator."""
host_indices: Indices = partial(torch.tensor, dtype=torch.int64)
"""The function that makes such a tensor on the host."""
Upload = Callable[[Sequence[int], torch.Tensor], None]
"""A function that copies numbers to the first entries of an int64 tensor on the accelerator."""
Capture = Callable[[Bound, str, Workspace], Bound]
"""A function that wraps a bound kernel so that a GPU replays it as a graph where its calls repeat.

The function's arguments are the bound kernel, the name of the kernel's operation, and the memory that the kernel is
bound to. The kernel must only launch GPU kernels, and write to memory that stays in place.
"""


def host_upload(numbers: Sequence[int], into: torch.Tensor) -> None:
    """Copy numbers to the first entries of `into`, an int64 tensor on the host; this is `Resources.upload` for CPUs."""
    into.view(-1)[: len(numbers)] = host_indices(numbers)


def uncaptured(run: Bound, operation: str, memory: Workspace) -> Bound:
    """Return `run` unchanged; this is `Resources.captured` for devices that replay no graphs."""
    return run


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources that a torch device gives to the constructor of each kernel.

    Attributes:
        config: the model.
        dtype: dtype of weights and hidden states.
        device: device of the accelerator's tensors.
        indices: function that makes an int64 tensor on the accelerator from numbers.
        upload: function that copies numbers to an int64 tensor on the accelerator.
        captured: function that wraps a bound kernel so that a GPU replays its calls as a graph, where the device can do
            that.
        use_cores_for: function that sets torch's number of cores for a product, given the number of rows and the number
            of entries of the matrix.
        team: divides independent products among the cores; None if products run one after the other, each on all cores.
        threads: the native kernels; None if the library is not installed or not wanted.
        fused_attention: True if the accelerator has a kernel for attention that stores no scores.
        table: the kernel table, by which a kernel finds the kernels of other operations that it calls.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    indices: Indices
    upload: Upload
    captured: Capture
    use_cores_for: Callable[[int, int], object]
    team: Team | None
    threads: NativeKernels | None
    fused_attention: bool
    table: KernelTable

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
"""The `Indices` of the host."""
Upload = Callable[[Sequence[int], torch.Tensor], None]
"""A function that copies numbers to the first entries of an int64 tensor on the accelerator."""
Capture = Callable[[Bound, str, Workspace], Bound]
"""A function that wraps a bound kernel so that a GPU replays it as a graph where its calls repeat.

Its arguments are the bound kernel, which must only launch GPU kernels and write to memory that stays; its operation;
and the memory that it is bound to.
"""


def host_upload(numbers: Sequence[int], into: torch.Tensor) -> None:
    """Copy numbers to the first entries of `into`, an int64 tensor on the host: the `Resources.upload` of the CPU."""
    into.view(-1)[: len(numbers)] = host_indices(numbers)


def uncaptured(run: Bound, operation: str, memory: Workspace) -> Bound:
    """Return `run` unchanged, ignoring the rest: the `Resources.captured` of devices that replay no graphs."""
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
        use_cores_for: function of a product's number of rows and number of weights that sets torch's number of cores.
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

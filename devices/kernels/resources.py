"""The resources that a torch device passes to the constructor of each kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from moesched.models.config import ModelConfig

from ..native.kernels import NativeKernels
from ..products.team import Team
from .memory import Memory
from .seam import Bound
from .table import KernelTable

Indices = Callable[[Sequence[int]], torch.Tensor]
"""A function that makes an int64 tensor of numbers on the accelerator."""
host_indices: Indices = partial(torch.tensor, dtype=torch.int64)
"""The `Indices` of the host."""
Upload = Callable[[Sequence[int], torch.Tensor], None]
"""A function that copies numbers to the first entries of an int64 tensor on the accelerator."""
Capture = Callable[[Bound, str, Memory], Bound]
"""A function that wraps a bound kernel so that a GPU replays it as a graph where its calls repeat.

Its arguments are the bound kernel, which must only launch GPU kernels and write to memory that stays; its operation;
and the memory that it is bound to.
"""


def host_upload(numbers: Sequence[int], into: torch.Tensor) -> None:
    """Copy numbers to the first entries of an int64 tensor on the host: the `Upload` of the host."""
    into.view(-1)[: len(numbers)] = host_indices(numbers)


def as_it_is(run: Bound, operation: str, memory: Memory) -> Bound:
    """Return the bound kernel unchanged: the `Capture` of a device without graphs."""
    return run


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The resources that kernels of a torch device get in their constructors.

    Attributes:
        config: the model.
        dtype: dtype of weights and hidden states.
        device: device of the accelerator's tensors.
        indices: makes an int64 tensor on the accelerator from numbers.
        upload: copies numbers to a tensor on the accelerator.
        captured: wraps a bound kernel so that its calls are replayed, where the accelerator can do that.
        use_cores_for: sets torch's number of cores for a product, given its numbers of rows and weights.
        team: divides independent products among the cores; None if they run one after the other, each on all cores.
        threads: the native kernels, with their threads; None if these are not installed or not wanted.
        fused_attention: whether the accelerator has a kernel for attention that stores no scores.
        table: finds the kernels for the operations that a kernel is made of.
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

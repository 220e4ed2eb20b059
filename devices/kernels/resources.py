"""Resources that the kernels of a torch device share: the model, the processor, its threads, and the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moesched.models.config import ModelConfig

from ..native.kernels import NativeKernels
from ..products.team import Team
from .memory import Memory
from .seam import Bound
from .table import KernelTable

Indices = Callable[[Sequence[int]], torch.Tensor]
"""Makes an int64 tensor of numbers, on some device."""
Upload = Callable[[Sequence[int], torch.Tensor], None]
"""Copies numbers to the first places of an int64 tensor, on some device."""
Capture = Callable[[Bound, str, Memory], Bound]
"""Returns a bound kernel that is replayed where its calls repeat: it launches kernels alone, into memory that stays.

The others are its operation, and the memory that it is bound to.
"""


def as_it_is(run: Bound, operation: str, memory: Memory) -> Bound:
    """Return a bound kernel that is called each time."""
    return run


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Arguments of the constructors of kernels.

    Attributes:
        config: the model.
        dtype: dtype of weights and hidden states.
        device: device of the accelerator's tensors.
        indices: makes an int64 tensor on the accelerator from numbers.
        upload: copies numbers to a tensor on the accelerator.
        captured: has a bound kernel replayed where the accelerator can do that.
        use_cores_for: sets torch's number of cores for a product, given its numbers of rows and weights.
        team: divides independent products among the cores; None if they run one after the other, each on all cores.
        threads: the native kernels, with their threads; None if these are not installed or not wanted.
        fused_attention: whether the accelerator has a kernel for attention that stores no scores.
        table: finds the kernels for the parts of others.
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

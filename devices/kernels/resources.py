"""Resources that the kernels of a torch device share: the model, the processor, its threads, and the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from moesched.models.config import ModelConfig

from ..native.kernels import NativeKernels
from ..products.team import Team
from .table import KernelTable

Indices = Callable[[Sequence[int]], torch.Tensor]
"""Makes an int64 tensor of numbers, on some device."""


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Arguments of the constructors of kernels.

    Attributes:
        config: of the model.
        dtype: of weights and hidden states.
        indices: makes an int64 tensor on the accelerator of numbers.
        use_cores_for: sets torch's number of cores for a product, given its rows and weights.
        team: divides independent products among the cores; None where they run one after the other, on all cores.
        threads: threads of the native kernels; None where these are not installed or not wanted.
        fused_attention: whether the accelerator has a kernel for attention that holds no scores.
        table: finds the kernels that others are made of.
    """

    config: ModelConfig
    dtype: torch.dtype
    indices: Indices
    use_cores_for: Callable[[int, int], object]
    team: Team | None
    threads: NativeKernels | None
    fused_attention: bool
    table: KernelTable

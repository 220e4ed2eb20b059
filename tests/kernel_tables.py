"""The kernels of a torch device on the CPU, without the device."""

from __future__ import annotations

from functools import partial

import torch

from moesched.devices.kernels.binder import Binder
from moesched.devices.kernels.resources import Resources
from moesched.devices.kernels.table import KernelTable
from moesched.devices.kernels.torch_kernels import fill
from moesched.devices.native.kernels import NativeKernels
from moesched.models.config import ModelConfig


def resources_of(
    config: ModelConfig, threads: NativeKernels | None, dtype: torch.dtype = torch.bfloat16
) -> Resources:
    """What kernels are made with; torch keeps its number of cores."""
    return Resources(
        config=config,
        dtype=dtype,
        indices=partial(torch.tensor, dtype=torch.int64),
        use_cores_for=lambda rows, weights: None,
        team=None,
        threads=threads,
        fused_attention=True,
        table=KernelTable(()),
    )


def kernels_of(
    config: ModelConfig, threads: NativeKernels | None, dtype: torch.dtype = torch.bfloat16
) -> Binder:
    """The table of all kernels; those of torch alone without threads."""
    resources = resources_of(config, threads, dtype)
    fill(resources.table, resources)
    return Binder(resources.table, config, str(dtype).removeprefix("torch."), "cpu")

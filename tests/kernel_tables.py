"""The kernels of a torch device on the CPU, without the device."""

from __future__ import annotations

import torch

from moesched.devices.kernels.binder import Binder
from moesched.devices.kernels.check import cpu_resources
from moesched.devices.native.kernels import NativeKernels
from moesched.models.config import ModelConfig


def kernels_of(
    config: ModelConfig, threads: NativeKernels | None, dtype: torch.dtype = torch.bfloat16
) -> Binder:
    """The table of all kernels; those of torch alone without threads."""
    table = cpu_resources(config, dtype, threads).table
    return Binder(table, config, str(dtype).removeprefix("torch."), "cpu")

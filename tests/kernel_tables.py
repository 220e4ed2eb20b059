"""The kernels of a torch device on the CPU: their table, and what a model says by one set of them."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.shared.small_runs import ONE_MEMORY, generate
from moesched.devices.kernels.binder import Binder
from moesched.devices.kernels.check import cpu_resources
from moesched.devices.native.kernels import NativeKernels
from moesched.devices.torch.device import TorchDevice
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.layout import weight_layout
from moesched.plugins import make_policy

TINY = Path(__file__).parents[1] / "examples" / "tiny-mixtral"


def kernels_of(
    config: ModelConfig, threads: NativeKernels | None, dtype: torch.dtype = torch.bfloat16
) -> Binder:
    """The table of all kernels; those of torch alone without threads."""
    table = cpu_resources(config, dtype, threads).table
    return Binder(table, config, str(dtype).removeprefix("torch."), "cpu")


def logits_by(kernel: str, dtype: str, new_tokens: int) -> torch.Tensor:
    """Logits of the shipped model for two prompts, by a device's setting `kernel`: (R, S, V)."""
    checkpoint = open_checkpoint(TINY)
    device = TorchDevice(checkpoint, weight_layout(checkpoint.config, dtype), keep_logits=True, kernel=kernel)
    prompts, policy = [[5, 6, 7], [90]], make_policy("resident")
    made = generate(device, policy, ONE_MEMORY, prompts, new_tokens=new_tokens, micro_batch_size=2)
    return made.logits_RSV

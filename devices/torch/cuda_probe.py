"""The operations and small runs on the first CUDA device that `moesched calibrate --device cuda` times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from moesched.calibration.model_runs import run_exercise
from moesched.machines import Machine
from moesched.models.config import DType, ModelConfig
from moesched.models.random_model import write_random_model
from moesched.seams import Policy
from moesched.system.cores import CorePlan
from moesched.system.memory import available_memory
from moesched.tasks import Task

from .cuda_device import CudaDevice, dtype_on, require_cuda
from .gpu_memory import with_usable_memory
from .gpu_operations import GpuOperations


class CudaProbe(GpuOperations):
    """Times operations on the first CUDA device and on the CPU, and runs small models on both.

    Args:
        cores: the division of the host's cores.
        folder: folder that the small models are written to.

    Attributes:
        gpu_name: the GPU's name as torch gives it.
        gpu_bytes: bytes of the GPU's memory.
        host_bytes: bytes of the host's memory that are available.
        half: the 16-bit dtype that the GPU computes in, "bfloat16" or "float16".
    """

    def __init__(self, cores: CorePlan, folder: Path) -> None:
        require_cuda()
        super().__init__(torch.device("cuda:0"), cores)
        gpu = torch.cuda.get_device_properties(0)
        self.gpu_name: str = gpu.name
        self.gpu_bytes: int = gpu.total_memory
        self.host_bytes = available_memory()
        own = dtype_on((gpu.major, gpu.minor), "bfloat16")
        self.half: DType = "bfloat16" if own == "bfloat16" else "float16"
        self._folder = folder

    def tasks(
        self,
        model: ModelConfig,
        policy: Policy,
        groups: Sequence[Sequence[int]],
        steps: int,
        machine: Machine,
    ) -> list[Task]:
        """Run a small random model by a policy on the GPU; returns the tasks in the order in which they ended.

        Args:
            groups: for each micro-batch the lengths of its prompts, in tokens.
            steps: number of steps, prefill included.
            machine: the machine that the run is planned for.
        """
        checkpoint = self._folder / model.name
        if not checkpoint.exists():
            write_random_model(model, checkpoint)
        torch.cuda.empty_cache()
        usable = with_usable_memory(machine, torch.cuda.mem_get_info(0)[0])
        return run_exercise(checkpoint, self.half, policy, groups, steps, CudaDevice, usable)

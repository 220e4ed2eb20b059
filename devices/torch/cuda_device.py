"""The torch device on CUDA: the same class, with its accelerator on the first CUDA device."""

from __future__ import annotations

from typing import Any

import torch

from moesched.errors import BadInput
from moesched.machines import Link, Machine, Processor, Roles, Tier
from moesched.machines.local import calibrated_gpu
from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import WeightLayout
from moesched.seams import Transport
from moesched.units import format_bytes

from .device import TorchDevice

ASSUMED_FLOPS = {"float32": 1e13, "bfloat16": 1e14}
ASSUMED_GPU_BANDWIDTH = 5e11
ASSUMED_LINK_BANDWIDTH = 1e10
ASSUMED_PIN_BANDWIDTH = 1e10

WORKSPACE_BYTES = 512_000_000
"""Bytes of the GPU for workspaces of its libraries and what the allocator rounds up, beside a twentieth of all."""


class CudaDevice(TorchDevice):
    """Kernels on the GPU, weights and CPU attention in host memory, copies on streams of their own."""

    def __init__(
        self, checkpoint: Checkpoint, layout: WeightLayout, *, keep_logits: bool = False, direct: bool = True
    ) -> None:
        require_cuda()
        super().__init__(checkpoint, layout, accelerator="cuda:0", keep_logits=keep_logits, direct=direct)

    def join(self, rank: int, transport: Transport, first: Any) -> None:
        """Work as one of several ranks, each on a GPU of its own, or as a node, on the first GPU of its machine.

        Raises:
            BadInput: there are fewer GPUs.
        """
        cut = self.layout.config.ranks > 1
        if cut and rank >= torch.cuda.device_count():
            raise BadInput(
                f"device cuda: torch sees {torch.cuda.device_count()} CUDA devices here: "
                "lower --tensor-parallel"
            )
        super().join(rank, transport, first)
        if cut:
            self._compute.accelerator = torch.device(f"cuda:{rank}")

    @staticmethod
    def machine(host: Machine) -> Machine:
        """This machine with its GPU: as it was calibrated, else with assumed rates, and the memory that is free."""
        require_cuda()
        gpu = torch.cuda.get_device_properties(0)
        calibrated = calibrated_gpu("cuda", gpu.name)
        if calibrated is not None:
            return calibrated
        memory = host.memories[host.host.memory]
        return Machine(
            name=f"{host.name} with {gpu.name}",
            description="rates of the GPU and its links are assumed; `moesched calibrate --device cuda` measures them",
            processors={
                "gpu": Processor(memory="gpu", flops=ASSUMED_FLOPS),
                "cpu": Processor(memory="host", flops=host.host.flops),
            },
            memories={
                "gpu": Tier(
                    capacity=usable_bytes(torch.cuda.mem_get_info(0)[0]), bandwidth=ASSUMED_GPU_BANDWIDTH
                ),
                "host": memory,
                "pinned": Tier(capacity=memory.nbytes // 4, bandwidth=memory.bandwidth),
            },
            links=[
                Link(source="pinned", destination="gpu", bandwidth=ASSUMED_LINK_BANDWIDTH, path="host->gpu"),
                Link(source="host", destination="gpu", bandwidth=ASSUMED_LINK_BANDWIDTH),
                Link(source="gpu", destination="host", bandwidth=ASSUMED_LINK_BANDWIDTH),
                Link(source="host", destination="pinned", bandwidth=ASSUMED_PIN_BANDWIDTH),
            ],
            roles=Roles(accelerator="gpu", host="cpu", weights="host", pinned="pinned"),
        )

    @staticmethod
    def check_machine(machine: Machine) -> None:
        """Check that a machine description fits this machine.

        Raises:
            BadInput: it has no GPU with a memory of its own.
        """
        if machine.unified:
            raise BadInput(
                f"machine {machine.name} has no accelerator with a memory of its own: use --device torch, "
                "or --machine auto"
            )


def usable_bytes(free: int) -> int:
    """Return the bytes of a GPU that a plan may use. Workspaces and the allocator's rounding need the rest.

    Raises:
        BadInput: too few are free.
    """
    usable = free - free // 20 - WORKSPACE_BYTES
    if usable <= 0:
        raise BadInput(
            f"device cuda: the GPU has {format_bytes(free)} free, less than its libraries need: end other programs "
            "that use it"
        )
    return usable


def require_cuda() -> None:
    """Check that there is a CUDA device.

    Raises:
        BadInput: there is none.
    """
    if not torch.cuda.is_available():
        raise BadInput("device cuda: torch sees no CUDA device here: use --device torch")

"""The torch device with a CUDA GPU as its accelerator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from moesched.errors import BadInput
from moesched.machines import Link, Machine, Processor, Roles, Staging, Tier
from moesched.machines.local import calibrated_gpu, processor_with
from moesched.models.checkpoint import Checkpoint
from moesched.models.layout import WeightLayout
from moesched.seams import Transport
from moesched.system.cores import require_threads
from moesched.system.cuda import FIRST_WITH_BFLOAT16, CudaFacts, trouble_of_driver, trouble_of_gpu

from ..kernels.fused_attention import has_fused_attention, prefer_kernels_without_plans
from ..kernels.torch_kernels import Row
from .device import TorchDevice
from .gpu_memory import let_segments_grow, usable_bytes, with_usable_memory
from .inspection import cuda_facts

FIRST_WITH_TRITON = (8, 0)
"""The least compute capability that the kernels in Triton compile for."""

ASSUMED_FLOPS = {"float32": 1e13, "bfloat16": 1e14, "float16": 1e14}

ASSUMED_GPU_BANDWIDTH = 5e11
ASSUMED_LINK_BANDWIDTH = 1e10
ASSUMED_STAGING_BANDWIDTH = 1e10


class CudaDevice(TorchDevice):
    """Runs batches of one model on a CUDA GPU and the host; copies between the two have streams of their own.

    The host's memory has the weights that do not stay on the GPU. The host computes attention or experts if the policy
    says so.

    Args:
        threads: number of threads for attention and experts on the host; None for all cores but those that
            `divided_cores` leaves for issuing tasks.
        triton: whether the kernels in Triton are tried before all others but `own_kernels`.
        keep_logits: whether `logits` keeps the logits of all steps.
        direct: whether to bypass the page cache when reading files, where the system allows that.
        map_files: whether the GPU copies streamed weights directly from the page cache where that is possible.
        own_kernels: the user's kernels, which are tried before all others: classes, or names such as `file.py:Class`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        layout: WeightLayout,
        *,
        keep_logits: bool = False,
        direct: bool = True,
        map_files: bool = True,
        threads: int | None = None,
        triton: bool = False,
        own_kernels: str | type | Sequence[str | type] = (),
    ) -> None:
        if threads is not None:
            require_threads(threads)
        require_cuda()
        let_segments_grow()
        prefer_kernels_without_plans()
        super().__init__(
            checkpoint,
            layout,
            accelerator="cuda:0",
            keep_logits=keep_logits,
            direct=direct,
            map_files=map_files,
            threads=threads,
            own_kernels=own_kernels,
        )
        self.replays = triton
        if triton:
            self._compute.kernels.front = kernels_in_triton()
        self._compute.kernels.fused_attention = has_fused_attention(
            self._compute.dtype, layout.config.attention.head_dim, torch.cuda.get_device_capability(0)
        )

    def join(self, rank: int, transport: Transport, first: Any) -> None:
        """Make this device one of several ranks or nodes that run a model together.

        Rank i of a tensor-parallel model has GPU i; a node has the first GPU of its machine.

        Args:
            rank: this device's number, from 0.
            transport: carries exchanges between the devices.
            first: not used by this device.

        Raises:
            BadInput: there are fewer GPUs than ranks; or the model was cut over ranks, and has a part that only a
                device with the whole model can compute, such as a shared expert.
        """
        ranks = self.layout.config.ranks
        self._compute.accelerator = torch.device("cuda", gpu_of(rank, ranks, torch.cuda.device_count()))
        super().join(rank, transport, first)

    def close(self) -> None:
        """Close the device, and free the GPU memory that libraries and the allocator keep."""
        super().close()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    @staticmethod
    def chosen_dtype(own: str) -> str:
        """Return the dtype to compute in: the model's own, but float16 for bfloat16 if the GPU is too old for bfloat16.

        own: name of the model's dtype.

        Raises:
            BadInput: there is no CUDA device.
        """
        require_cuda()
        return dtype_on(torch.cuda.get_device_capability(0), own)

    @staticmethod
    def machine(host: Machine) -> Machine:
        """Return the profile of this machine with its first GPU.

        If this GPU was calibrated, the result is the calibrated profile; otherwise it is `host`, with the GPU added at
        assumed rates. Either profile gives the GPU only the bytes of memory that a plan may use now.
        """
        require_cuda()
        gpu = torch.cuda.get_device_properties(0)
        free = torch.cuda.mem_get_info(0)[0]
        calibrated = calibrated_gpu("cuda", gpu.name)
        if calibrated is not None:
            return with_usable_memory(calibrated, free)
        memory = host.memories[host.host.memory]
        return Machine(
            name=f"{host.name} with {gpu.name}",
            description="rates of the GPU and its links are assumed; `moesched calibrate --device cuda` measures them",
            processors={
                "gpu": Processor(memory="gpu", flops=assumed_flops((gpu.major, gpu.minor))),
                "cpu": Processor(memory="host", flops=with_float16(host.host.flops)),
            },
            memories={
                "gpu": Tier(capacity=usable_bytes(free), bandwidth=ASSUMED_GPU_BANDWIDTH),
                "host": memory,
            },
            links=[
                Link(source="host", destination="gpu", bandwidth=ASSUMED_LINK_BANDWIDTH),
                Link(source="gpu", destination="host", bandwidth=ASSUMED_LINK_BANDWIDTH),
            ],
            roles=Roles(accelerator="gpu", host="cpu", weights="host"),
            staging=Staging(bandwidth=ASSUMED_STAGING_BANDWIDTH),
        )

    @staticmethod
    def processors() -> str:
        """Return the names of this machine's processor and of its first GPU.

        Raises:
            BadInput: there is no CUDA device.
        """
        require_cuda()
        return processor_with(torch.cuda.get_device_name(0))

    @staticmethod
    def check_machine(machine: Machine) -> None:
        """Check that batches which were planned for a machine can run on a GPU.

        Raises:
            BadInput: the machine has no GPU with a memory of its own.
        """
        if machine.unified:
            raise BadInput(
                f"machine {machine.name} has no accelerator with a memory of its own: use --device torch, "
                "or --machine auto"
            )


def dtype_on(capability: tuple[int, int], own: str) -> str:
    """Return the dtype to compute in on a GPU: the model's own; for bfloat16 on a GPU too old for it, float16.

    Args:
        capability: the GPU's compute capability, major and minor.
        own: name of the model's dtype.
    """
    return "float16" if own == "bfloat16" and capability < FIRST_WITH_BFLOAT16 else own


def assumed_flops(capability: tuple[int, int]) -> dict[str, float]:
    """Return assumed FLOP/s of a GPU that was not calibrated, for each dtype that the GPU has.

    capability: the GPU's compute capability, major and minor.
    """
    return {dtype: rate for dtype, rate in ASSUMED_FLOPS.items() if dtype_on(capability, dtype) == dtype}


def with_float16(flops: Mapping[str, float]) -> dict[str, float]:
    """Add float16 to a CPU's FLOP/s by dtype; the CPU converts float16 to float32, so the rates are equal."""
    return {**({"float16": flops["float32"]} if "float32" in flops else {}), **flops}


def gpu_of(rank: int, ranks: int, gpus: int) -> int:
    """Return the number of a rank's GPU: the rank's own number if the model is cut over ranks, else 0.

    Args:
        rank: number of the rank, from 0.
        ranks: number of ranks that the model is cut over; 1 where nodes share the model's experts.
        gpus: number of GPUs that torch sees.

    Raises:
        BadInput: there are fewer GPUs than ranks.
    """
    number = rank if ranks > 1 else 0
    if number >= gpus:
        raise BadInput(f"device cuda: torch sees {gpus} CUDA devices here: lower --tensor-parallel")
    return number


def require_cuda() -> None:
    """Check that torch can use the first CUDA device.

    Raises:
        BadInput: torch cannot use it; the message has the reason and the remedy.
    """
    reason = refusal(cuda_facts(most_gpus=1))
    if reason is not None:
        raise BadInput(f"device cuda: {reason}")


def refusal(cuda: CudaFacts) -> str | None:
    """Return the reason why torch cannot use the first CUDA device, with the remedy; None if torch can."""
    trouble = trouble_of_driver(cuda) or trouble_of_gpu(cuda.gpus[0], cuda)
    return trouble and f"{trouble.says}: {trouble.remedy}; or use --device torch"


def kernels_in_triton() -> Sequence[Row]:
    """Register the launches of Triton kernels as torch operators; returns these kernels' rows of the kernel table.

    Raises:
        BadInput: Triton is not installed, or the GPU is too old for Triton.
    """
    if find_spec("triton") is None:
        raise BadInput("triton is not installed: pip install triton, or leave out --device-set triton=true")
    capability = torch.cuda.get_device_capability(0)
    if capability < FIRST_WITH_TRITON:
        first, own = (".".join(map(str, each)) for each in (FIRST_WITH_TRITON, capability))
        raise BadInput(
            f"kernels in Triton are for GPUs of compute capability {first} and above, this one has {own}: leave out "
            "--device-set triton=true"
        )
    import_module("moesched.devices.kernels.triton_launches")  # Triton takes half a second to import
    from ..kernels.triton_rows import TRITON

    return TRITON

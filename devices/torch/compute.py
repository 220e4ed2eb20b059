"""The accelerator that the torch device computes on, its kernels, and the division of the host's cores."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moesched.models.layout import WeightLayout
from moesched.system.cores import CorePlan, divided_cores, usable_cores

from ..kernels.resources import Indices, Upload, host_indices, host_upload, uncaptured
from ..kernels.torch_kernels import TorchKernels
from ..products.bfloat16_support import has_bfloat16
from ..products.row_tiles import CODE_BYTES
from ..products.team import use_cores
from ..shared.page_reader import DTYPES
from .captured import Graphs
from .copies import NumberRing
from .cores import Cores
from .fixed_steps import Replays


class Compute:
    """The accelerator that a model runs on, and the kernels on it and on the host, which all batches share.

    Args:
        accelerator: torch's name of the accelerator, such as "cuda:0", or "cpu".
        kernel: the kernels on the CPU that multiply few rows by bfloat16 weights: "torch", or the name of the
            instruction set of the native ones; "auto" for the best one of this machine.
        pin: whether each thread of the native kernels is pinned to a core of its own.
        threads: number of threads of kernels on the CPU; None to choose it by the number of cores.
        own_kernels: the user's kernels: classes, or names such as `file.py:Class`.

    Attributes:
        accelerator: torch device of the accelerator's tensors.
        dtype: dtype of weights and hidden states.
        core_plan: the division of the host's cores among kernels, copies, and the issuing of tasks.
        use_cores_for: a function that sets torch's number of cores for a matrix product, given the product's number
            of rows and the matrix's number of entries.
        kernels: chooses and keeps the kernel of each operation.
        indices: a function that makes an int64 tensor on the accelerator from a sequence of numbers.
        replays: wraps bound kernels so that a GPU replays their calls; None on the CPU.
    """

    def __init__(
        self,
        accelerator: str,
        layout: WeightLayout,
        kernel: str,
        pin: bool,
        threads: int | None,
        own_kernels: Sequence[str | type] = (),
    ) -> None:
        self.accelerator = torch.device(accelerator)
        self.dtype = DTYPES[layout.dtype]
        cores = usable_cores()
        self.core_plan = CorePlan(threads or cores, 0, 0) if self.on_cpu else divided_cores(cores, threads)
        self.use_cores_for = Cores(self.cores, self.dtype).use_for
        self.indices: Indices = host_indices
        self.kernels = TorchKernels(
            self.accelerator,
            layout,
            kernel,
            own_kernels,
            cores=self.cores,
            pin=pin,
            free_cores=self.core_plan.issuing,
            use_cores_for=self.use_cores_for,
        )
        self.replays = None if self.on_cpu else Replays(Graphs(self.accelerator))
        self._threads_before: int | None = None

    @property
    def on_cpu(self) -> bool:
        """True if the accelerator is the CPU."""
        return self.accelerator.type == "cpu"

    @property
    def cores(self) -> int:
        """The number of cores for kernels on the CPU."""
        return self.core_plan.kernels

    @property
    def own_bytes(self) -> int:
        """Bytes of the code that oneDNN generates for bfloat16 products; 0 if oneDNN computes none."""
        bfloat16 = self.on_cpu and self.dtype == torch.bfloat16 and has_bfloat16()
        return CODE_BYTES if bfloat16 and not self.kernels.all_native else 0

    def start(self, rows_an_expert: float) -> None:
        """Start the kernels' threads and choose kernels for the operations; later calls do nothing.

        rows_an_expert: mean number of rows that an expert has in a decode step.
        """
        if self._threads_before is not None:
            return
        self._threads_before = torch.get_num_threads()
        upload: Upload = host_upload
        captured = self.replays.captured if self.replays else uncaptured
        if not self.on_cpu:
            ring = NumberRing(self.accelerator)
            self.indices, upload = ring.indices, ring.upload
        self.kernels.start(rows_an_expert, self.accelerator, self.indices, upload, captured)

    def close(self) -> None:
        """End the threads, and restore the number of cores that torch used before."""
        self.kernels.close()
        self.indices = host_indices
        if self._threads_before is not None:
            use_cores(self._threads_before)

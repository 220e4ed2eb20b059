"""The accelerator of the torch device with its kernels, and the division of the host's cores."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moesched.models.layout import WeightLayout
from moesched.system.cores import CorePlan, divided_cores, usable_cores

from ..kernels.resources import Indices, Upload, as_it_is, host_indices, host_upload
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
    """The accelerator that a model runs on, and its kernels, which all batches share.

    Args:
        accelerator: torch device, such as "cuda:0".
        kernel, pin, threads, own_kernels: as for `TorchDevice`.

    Attributes:
        accelerator: torch device of the accelerator's tensors.
        dtype: dtype of weights and hidden states.
        core_plan: the division of the host's cores; None on the CPU alone, where kernels have all.
        use_cores_for: sets the number of cores for a product, given its numbers of rows and weights.
        kernels: the kernels of the operations.
        indices: makes an int64 tensor on the accelerator from numbers.
        replays: wraps bound kernels so that a GPU replays them; None on the CPU.
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
            left=self.core_plan.issuing,
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
        """Bytes of the code that oneDNN generates for products of bfloat16; 0 if it computes none."""
        bfloat16 = self.on_cpu and self.dtype == torch.bfloat16 and has_bfloat16()
        return CODE_BYTES if bfloat16 and not self.kernels.all_native else 0

    def start(self, rows_an_expert: float) -> None:
        """Start threads and fill the table of kernels; later calls do nothing.

        rows_an_expert: mean number of an expert's rows in a decode step.
        """
        if self._threads_before is not None:
            return
        self._threads_before = torch.get_num_threads()
        upload: Upload = host_upload
        captured = self.replays.captured if self.replays else as_it_is
        if not self.on_cpu:
            ring = NumberRing(self.accelerator)
            self.indices, upload = ring.indices, ring.upload
        self.kernels.start(rows_an_expert, self.accelerator, self.indices, upload, captured)

    def close(self) -> None:
        """End the threads, and restore torch's number of cores."""
        self.kernels.close()
        self.indices = host_indices
        if self._threads_before is not None:
            use_cores(self._threads_before)

"""The accelerator of the torch device, and the kernel and threads for products on the CPU."""

from __future__ import annotations

from functools import partial

import torch

from moesched.models.layout import WeightLayout
from moesched.system.cores import CorePlan, divided_cores, usable_cores

from ..native.compiled import check_choice
from ..native.layers import NativeLayers
from ..products.bfloat16_support import has_bfloat16
from ..products.crossover import Shape
from ..products.linear import Tensor
from ..products.packed_weights import cores_keep_bits, pack, packed_bytes, packing_pays
from ..products.products import Products, make_kernel, rows_for_kernel
from ..products.row_tiles import CODE_BYTES
from ..products.team import Team
from ..shared.arena import copy_placed_alike
from ..shared.page_reader import DTYPES
from .copies import Indices, NumberRing, host_indices
from .cores import Cores

COMPUTED_IN_FLOAT32 = ".router"
"""The end of the name of weights that are converted for each use: packed ones cannot be."""


class Compute:
    """The accelerator that a model runs on, and the kernel and threads for products on the CPU.

    All batches share them, so that all get the same bits.

    Args:
        accelerator: such as "cuda:0".
        kernel, pin, threads: as for `TorchDevice`.

    Attributes:
        accelerator: where the accelerator's tensors are.
        dtype: of weights and hidden states.
        core_plan: the division of the cores; on the CPU alone, kernels have all.
        fused_attention: whether the accelerator has a kernel for attention that holds no scores.
        use_cores_for: sets the number of cores for a product, given its rows and weights.
        products: multiplies by weights.
        indices: makes an int64 tensor on the accelerator of numbers.
        native: runs whole tasks of few rows; None where torch does.
        team: divides experts and blocks of the LM head among the cores; None where products run one after the other,
            each on all cores.
    """

    def __init__(
        self, accelerator: str, layout: WeightLayout, kernel: str, pin: bool, threads: int | None
    ) -> None:
        transposed = layout.config.routed.transposed_down
        self.accelerator = torch.device(accelerator)
        self.dtype = DTYPES[layout.dtype]
        cores = usable_cores()
        self.core_plan = CorePlan(threads or cores, 0, 0) if self.on_cpu else divided_cores(cores, threads)
        self.fused_attention = True
        self.use_cores_for = Cores(self.cores, self.dtype).use_for
        self.products = Products()
        self.indices: Indices = host_indices
        self.team: Team | None = None
        self.native: NativeLayers | None = None
        self._config = layout.config
        check_choice(kernel)
        expert = Shape(layout.config.routed.intermediate, layout.config.hidden)
        self._kernel_rows = partial(rows_for_kernel, kernel, layout.dtype, expert)
        self._make_kernel = partial(
            make_kernel, kernel, cores=self.cores, pin=pin, left=self.core_plan.issuing
        )
        self._packs = self.on_cpu and layout.dtype == "bfloat16" and packing_pays(transposed, self.cores)
        self._shares = self.on_cpu and self.cores > 1 and cores_keep_bits(self.dtype, self.cores, transposed)
        self._threads_before: int | None = None

    @property
    def on_cpu(self) -> bool:
        """Whether the accelerator is the CPU."""
        return self.accelerator.type == "cpu"

    @property
    def cores(self) -> int:
        """The number of cores for kernels on the CPU."""
        return self.core_plan.kernels

    @property
    def own_bytes(self) -> int:
        """Bytes of oneDNN's code for the shapes of products."""
        return CODE_BYTES if self.on_cpu and self.dtype == torch.bfloat16 and has_bfloat16() else 0

    def start(self, rows_an_expert: float) -> None:
        """Start kernel and threads, given the rows of an expert in a decode step; later calls do nothing."""
        if self._threads_before is not None:
            return
        self._threads_before = torch.get_num_threads()
        if not self.on_cpu:
            self.indices = NumberRing(self.accelerator).indices
        if self._packs and rows_an_expert <= self._kernel_rows(packed=True):
            self._packs = False  # only torch multiplies by packed weights
        rows = 0 if self._packs else self._kernel_rows(packed=False)
        native = self._make_kernel(rows)
        self.products = Products(native)
        self.native = NativeLayers(self._config, native) if native and rows and self.on_cpu else None
        if self._shares:
            self.team = Team(self.cores)

    @property
    def arranges(self) -> bool:
        """Whether tensors that stay are not kept as they were read."""
        return self._packs or not self.on_cpu

    def arranged(self, name: str, tensor: Tensor) -> Tensor:
        """A copy on the accelerator of a tensor that stays, packed for oneDNN where that pays."""
        if self._packs and tensor.dim() == 2 and not name.endswith(COMPUTED_IN_FLOAT32):
            packed = pack(tensor)
            if packed_bytes(packed) <= tensor.nbytes:
                return packed
        return copy_placed_alike(tensor, self.accelerator)

    def close(self) -> None:
        """End the threads, and restore torch's number of cores."""
        self.products.close()
        self.native = None
        self.indices = host_indices
        if self.team is not None:
            self.team.close()
        if self._threads_before is not None:
            torch.set_num_threads(self._threads_before)

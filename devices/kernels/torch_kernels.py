"""The kernels of a torch device: their table and threads, and the arrangement of weights that stay for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from moesched.models.layout import WeightLayout

from ..native.compiled import AUTO, TORCH, check_choice, instruction_sets
from ..native.kernels import NativeKernels
from ..products.crossover import Shape, most_rows
from ..products.packed_weights import cores_keep_bits, pack, packed_bytes, packing_pays
from ..products.team import Team
from .layer_weights import Tensor, Weights
from .memory import Memory
from .native_attention import NATIVE_ATTENTION
from .native_rows import NATIVE
from .resources import Indices, Resources
from .seam import OPERATIONS, Bound, Case, Kernel
from .table import KernelTable
from .torch_rows import TORCH as TORCH_ROWS

COMPUTED_IN_FLOAT32 = ".router"
"""The end of the name of weights that are converted for each use: packed ones cannot be."""


class TorchKernels:
    """The kernels of a device. All batches share them, so that all get the same bits.

    Args:
        device: of the accelerator's tensors.
        choice: `auto`, `torch`, or an instruction set of the native kernels.
        cores: for kernels on the CPU.
        pin, left: as for `NativeKernels`.
        use_cores_for: sets torch's number of cores for a product, given its rows and weights.

    Attributes:
        table: the kernels; without any until `start`.
        threads: of the native kernels; None until `start`, and where torch does everything.
        team: divides experts and blocks of the LM head among the cores; None where products run one after the other,
            each on all cores.
        fused_attention: whether the accelerator has a kernel for attention that holds no scores.

    Raises:
        BadInput: this machine has no such kernel.
    """

    def __init__(
        self,
        device: torch.device,
        layout: WeightLayout,
        choice: str,
        *,
        cores: int,
        pin: bool,
        left: int,
        use_cores_for: Callable[[int, int], object],
    ) -> None:
        check_choice(choice)
        transposed, on_cpu = layout.config.routed.transposed_down, device.type == "cpu"
        self.table = KernelTable(())
        self.threads: NativeKernels | None = None
        self.team: Team | None = None
        self.fused_attention = True
        self._device = device.type
        self._layout = layout
        self._dtype = getattr(torch, layout.dtype)
        self._cores = cores
        self._use_cores_for = use_cores_for
        expert = Shape(layout.config.routed.intermediate, layout.config.hidden)
        self._rows = partial(rows_for_native, choice, layout.dtype, expert)
        self._open = partial(open_native, choice, cores=cores, pin=pin, left=left)
        self._packs = on_cpu and layout.dtype == "bfloat16" and packing_pays(transposed, cores)
        self._shares = on_cpu and cores > 1 and cores_keep_bits(self._dtype, cores, transposed)

    def start(self, rows_an_expert: float, indices: Indices) -> None:
        """Start the threads and fill the table.

        Args:
            rows_an_expert: the mean rows of an expert in a decode step, for which weights that stay are arranged.
            indices: makes an int64 tensor on the accelerator of numbers.
        """
        if self._packs and rows_an_expert <= self._rows(packed=True):
            self._packs = False  # only torch multiplies by packed weights
        self.threads = self._open(0 if self._packs else self._rows(packed=False))
        if self._shares:
            self.team = Team(self._cores)
        self.table = KernelTable(())
        resources = Resources(
            config=self._layout.config,
            dtype=self._dtype,
            indices=indices,
            use_cores_for=self._use_cores_for,
            team=self.team,
            threads=self.threads,
            fused_attention=self.fused_attention,
            table=self.table,
        )
        native = (*NATIVE, *NATIVE_ATTENTION) if self.threads else ()
        for row in (*native, *TORCH_ROWS):
            self.table.add(row(resources))

    def bound(self, operation: str, weights: Weights, memory: Memory) -> Bound:
        """The kernel for an operation on the accelerator, bound to weights, for as many rows as the memory has."""
        return memory.bound((operation, weights.number)) or self._bind(
            self._case(operation, weights, memory.rows), weights, memory
        )

    def fused(self, operation: str, weights: Weights, memory: Memory) -> Bound | None:
        """The same for an operation that others can do; None where no kernel takes it."""
        bound = memory.bound((operation, weights.number))
        if bound is None:
            case = self._case(operation, weights, memory.rows)
            bound = self._bind(case, weights, memory) if self.table.find(case) else None
        return bound

    def attention(self, layer: int, memory: Memory, *, decodes: bool, on_host: bool = False) -> Bound:
        """Attention over the cache of a layer.

        decodes: whether it is a decode step, with one new token for each sequence.
        """
        device = "cpu" if on_host else self._device
        key = "attention", layer, decodes, device
        bound = memory.bound(key)
        if bound is None:
            described = self._layout.config.layer(layer)
            case = Case("attention", memory.rows, frozenset(), self._layout.dtype, device, described, decodes)
            bound = self.table.bind(case, None, memory)
            memory.keep(key, bound)
        return bound

    def prompt_attention(self, layer: int, rows: int) -> Bound:
        """Attention over views of keys and values, on the accelerator."""
        described = self._layout.config.layer(layer)
        return self.table.bind(
            Case("prompt_attention", rows, frozenset(), self._layout.dtype, self._device, described)
        )

    def expert(
        self, weights: Weights, expert: int, rows: int, *, on_host: bool = False
    ) -> tuple[Kernel, Bound]:
        """The kernel for an expert on some rows, and the same bound to its weights."""
        part = weights.expert(expert)
        case = Case(
            "expert",
            rows,
            part.formats(OPERATIONS["expert"]),
            self._layout.dtype,
            "cpu" if on_host else self._device,
            weights.layer,
        )
        kernel = self.table.require(case)
        bound = part.bounds.get(kernel.name)
        if bound is None:
            bound = part.bounds[kernel.name] = self.table.bound_to(kernel, case, part)
        return kernel, bound

    def combine(self, memory: Memory) -> Bound:
        """The weighted sum of the experts' outputs, and the residual."""
        bound = memory.bound("combine")
        if bound is None:
            case = Case("combine", memory.rows, frozenset(), self._layout.dtype, self._device)
            bound = self.table.bind(case, None, memory)
            memory.keep("combine", bound)
        return bound

    def _case(self, operation: str, weights: Weights, rows: int) -> Case:
        formats = weights.formats(OPERATIONS[operation])
        return Case(operation, rows, formats, self._layout.dtype, self._device, weights.layer)

    def _bind(self, case: Case, weights: Weights, memory: Memory) -> Bound:
        kernel = self.table.require(case)
        if kernel.uses_memory:
            bound = self.table.bound_to(kernel, case, weights, memory)
            memory.keep((case.operation, weights.number), bound)
            return bound
        key = case.operation, case.rows
        found = weights.bounds.get(key)
        if found is None:
            found = weights.bounds[key] = self.table.bound_to(kernel, case, weights, memory)
        return found

    @property
    def arranges(self) -> bool:
        """Whether tensors that stay are not kept as they were read."""
        return self._packs or self._device != "cpu"

    def packed(self, name: str, tensor: Tensor) -> Tensor | None:
        """A copy of a tensor that stays, packed for oneDNN; None where that does not pay."""
        if not self._packs or tensor.dim() != 2 or name.endswith(COMPUTED_IN_FLOAT32):
            return None
        packed = pack(tensor)
        return packed if packed_bytes(packed) <= tensor.nbytes else None

    def close(self) -> None:
        """End the threads."""
        if self.threads is not None:
            self.threads.close()
            self.threads = None
        if self.team is not None:
            self.team.close()
        self.table = KernelTable(())


def rows_for_native(choice: str, dtype: str, shape: Shape, packed: bool) -> int:
    """The most rows for which the native kernels are used; 0 where they are not used at all.

    Args:
        choice: `auto`, `torch`, or an instruction set.
        shape: of the matrices that most weights are in.
        packed: whether torch would multiply by packed weights.
    """
    if choice == TORCH or dtype != "bfloat16" or not instruction_sets():
        return 0
    return most_rows(instruction_sets()[0] if choice == AUTO else choice, shape, packed)


def open_native(
    choice: str, rows: int, *, cores: int, pin: bool = False, left: int = 0
) -> NativeKernels | None:
    """The native kernels, with their threads, for up to `rows` rows; None where torch does everything.

    cores, pin, left: as for `NativeKernels`.
    """
    if choice == TORCH or not instruction_sets():
        return None
    return NativeKernels(rows, None if choice == AUTO else choice, cores, pin, left)

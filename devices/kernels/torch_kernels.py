"""The kernels of a torch device: their table, the threads they compute on, and the layout of resident weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from moesched import plugins
from moesched.errors import BadInput
from moesched.models.layout import WeightLayout
from moesched.seams import KernelRow

from ..native.compiled import AUTO, TORCH, check_choice, instruction_sets
from ..native.kernels import NativeKernels
from ..products.crossover import ANY_ROWS, Shape, most_rows
from ..products.packed_weights import cores_keep_bits, pack, packed_bytes, packing_pays
from ..products.team import Team
from ..shared.arena import copy_placed_alike
from ..shared.coded import Block, CodedRows
from ..shared.page_reader import DTYPES
from .binder import Binder
from .coded_rows import CODED_ROWS
from .expert_of_products import ExpertOfProducts
from .guarded import Guarded
from .native_attention import NATIVE_ATTENTION
from .native_rows import NATIVE
from .resources import Capture, Indices, Resources, Upload
from .seam import OPERATIONS, ROWS, Case, Kernel
from .table import KernelTable, listed, require_operation
from .torch_rows import TORCH as TORCH_ROWS

Row = Callable[[Resources], Kernel]
"""The class of a kernel, or another function that makes one."""

COMPUTED_IN_FLOAT32 = ".router"
"""The end of the names of weights that are converted to float32 at each use, which is impossible for packed ones."""

PLAIN = {
    operation.name: frozenset({ROWS}) if operation.matrices else frozenset[str]()
    for operation in OPERATIONS.values()
    if operation.name != "prompt_attention"
}
"""The storage formats of plain weights, for each operation of a decode step."""


class TorchKernels(Binder):
    """The kernels of a torch device. All batches share them, so that all get the same bits.

    Args:
        device: device of the accelerator's tensors.
        choice: kernels for few rows on the CPU: `auto`, `torch`, or an instruction set of the native kernels.
        own: third-party kernels: classes, or names such as `file.py:Class`.
        cores: number of cores for kernels on the CPU.
        pin: whether each thread of the native kernels is pinned to a core.
        free_cores: number of cores kept free of these threads.
        use_cores_for: function that sets torch's number of cores for a product, given the number of rows and the number
            of entries of the matrix.

    Attributes:
        table: the kernel table; empty until `start`.
        threads: the native kernels; None until `start`, and if torch computes everything.
        front: classes of kernels for this device only. In the table they come after third-party kernels and before all
            others.
        team: divides experts and blocks of the LM head among the cores; None if products run one after the other, each
            on all cores.
        fused_attention: True if the accelerator has a kernel for attention that stores no scores.

    Raises:
        BadInput: this machine lacks the chosen kernel.
    """

    def __init__(
        self,
        device: torch.device,
        layout: WeightLayout,
        choice: str,
        own: Sequence[str | type],
        *,
        cores: int,
        pin: bool,
        free_cores: int,
        use_cores_for: Callable[[int, int], object],
    ) -> None:
        check_choice(choice)
        transposed, on_cpu = layout.config.routed.transposed_down, device.type == "cpu"
        super().__init__(KernelTable(()), layout.config, layout.dtype, device.type)
        self.threads: NativeKernels | None = None
        self.team: Team | None = None
        self.front: Sequence[Row] = ()
        self.fused_attention = True
        self._cores = cores
        self._own = [plugins.find("kernels", each) for each in [*own, *plugins.names("kernels")]]
        self._use_cores_for = use_cores_for
        expert = Shape(layout.config.routed.intermediate, layout.config.hidden)
        self._rows = partial(rows_for_native, choice, layout.dtype, expert)
        self._open = partial(open_native, choice, cores=cores, pin=pin, free_cores=free_cores)
        plain = on_cpu and layout.dtype == "bfloat16" and not layout.config.coded_formats
        plain = plain and layout.config.routed.is_usual  # other experts have products of their own
        self._packs = plain and packing_pays(transposed, cores)
        self._shares = on_cpu and cores > 1 and cores_keep_bits(DTYPES[layout.dtype], cores, transposed)

    def start(
        self,
        rows_an_expert: float,
        device: torch.device,
        indices: Indices,
        upload: Upload,
        captured: Capture,
    ) -> None:
        """Start the threads and fill the kernel table.

        Args:
            rows_an_expert: mean number of rows of an expert in a decode step, which decides if resident weights are
                packed.
            device: device of the accelerator's tensors.
            indices, upload, captured: functions as in `Resources`, which make an int64 tensor on that device, copy
                numbers to such a tensor, and let a GPU replay the calls of a kernel.
        """
        if self._packs and rows_an_expert <= self._rows(packed=True):
            self._packs = False  # only torch multiplies by packed weights
        self.threads = self._open(0 if self._packs else self._rows(packed=False))
        if self._shares:
            self.team = Team(self._cores)
        self.table = KernelTable(())
        resources = Resources(
            config=self._config,
            dtype=DTYPES[self.dtype],
            device=device,
            indices=indices,
            upload=upload,
            captured=captured,
            use_cores_for=self._use_cores_for,
            team=self.team,
            threads=self.threads,
            fused_attention=self.fused_attention,
            table=self.table,
        )
        for row in self._own:
            self.table.add(guarded(row, resources))
        for front in self.front:
            self.table.add(front(resources))
        fill(self.table, resources)

    def rows_apart(self, rows: int) -> bool:
        """Test whether a row's results have the same bits with any other rows, in decode steps of up to `rows` rows."""
        coded = frozenset(self._config.coded_formats)
        cases = (
            Case(name, count, plain and plain | coded, self.dtype, self._device, layer, name == "attention")
            for layer in self._config.kinds
            for name, plain in PLAIN.items()
            for count in range(1, rows + 1)
        )
        return not self._packs and all(map(self._is_independent, cases))

    def _is_independent(self, case: Case) -> bool:
        kernel = self.table.find(case)
        if kernel is None:
            return bool(OPERATIONS[case.operation].parts)
        parts = [case._replace(operation=name) for name in kernel.made_of]
        return kernel.independent or (bool(parts) and all(map(self._is_independent, parts)))

    @property
    def all_native(self) -> bool:
        """True if the native kernels compute all products with plain weights, whatever the number of rows."""
        network = self._config.routed
        by_rows = network.is_usual and not network.transposed_down
        return by_rows and all(self._rows(packed=packed) == ANY_ROWS for packed in {False, self._packs})

    @property
    def arranges(self) -> bool:
        """True if resident weights, once read, are packed for oneDNN or copied to a GPU."""
        return self._packs or self._device != "cpu"

    def arranged(self, name: str, tensor: Block, device: torch.device) -> Block:
        """Copy the resident tensor `name` to a device, packed for oneDNN where that makes products faster."""
        if isinstance(tensor, CodedRows):
            return tensor.copied(device)
        if self._packs and tensor.dim() == 2 and not name.endswith(COMPUTED_IN_FLOAT32):
            packed = pack(tensor)
            if packed_bytes(packed) <= tensor.nbytes:
                return packed
        return copy_placed_alike(tensor, device)

    def close(self) -> None:
        """End the threads."""
        if self.threads is not None:
            self.threads.close()
            self.threads = None
        if self.team is not None:
            self.team.close()
        self.table = KernelTable(())


def guarded(row: type, resources: Resources) -> Guarded:
    """Make a kernel of a third-party class, and wrap the kernel so that errors name it.

    Raises:
        BadInput: `row` is no class of kernels, or raised; the message names the class.
    """
    name = _title(_required(row))
    try:
        kernel = row(resources)
    except BadInput:
        raise
    except Exception as error:  # a kernel from elsewhere may raise anything
        raise BadInput(
            f"kernel {name} cannot be made of (resources): {type(error).__name__}: {error}"
        ) from error
    return Guarded(kernel, resources.config, resources.dtype)


def _title(row: type) -> str:
    return f"{row.__module__}:{row.__qualname__}"


def _required(row: type) -> type[Kernel]:
    """Check that a class is a class of kernels, and return it.

    Raises:
        BadInput: it is no class of kernels, lacks an attribute, or has an operation that does not exist.
    """
    if not issubclass(row, Kernel):
        raise BadInput(f"{_title(row)} is not a kernel: derive it from moesched.devices.kernels.seam.Kernel")
    for name in ("operation", "name", "takes"):
        if not isinstance(getattr(row, name, None), str):
            raise BadInput(f"kernel {_title(row)} has no `{name}`: give its class one, a text")
    require_operation(row)
    return row


def kernel_rows() -> list[KernelRow]:
    """Describe the kernels of the torch device's table on this machine, by operation and in the table's order.

    Third-party kernels that cannot be loaded come first, without an operation.
    """
    own: list[type[Kernel]] = []
    unloaded = []
    for name in plugins.names("kernels"):
        try:
            own.append(_required(plugins.find("kernels", name)))
        except BadInput as error:
            unloaded.append(KernelRow("", name, "", str(error)))
    return unloaded + listed([*own, *NATIVE, *NATIVE_ATTENTION, *CODED_ROWS, *TORCH_ROWS, ExpertOfProducts])


def fill(table: KernelTable, resources: Resources) -> None:
    """Add the shipped kernels to a table: native ones if there are threads, ones for quantised weights, and torch's."""
    native = (*NATIVE, *NATIVE_ATTENTION) if resources.threads else ()
    for row in (*native, *CODED_ROWS, *TORCH_ROWS, ExpertOfProducts):
        table.add(row(resources))


def rows_for_native(choice: str, dtype: str, shape: Shape, packed: bool) -> int:
    """Return the largest number of rows for which native kernels, not torch, multiply by plain weights; 0 for never.

    Args:
        choice: `auto`, `torch`, or an instruction set.
        dtype: name of the model's dtype.
        shape: shape of the matrices that hold most weights.
        packed: True if torch would multiply by packed weights.
    """
    if choice == TORCH or dtype != "bfloat16" or not instruction_sets():
        return 0
    return most_rows(instruction_sets()[0] if choice == AUTO else choice, shape, packed)


def open_native(
    choice: str, rows: int, *, cores: int, pin: bool = False, free_cores: int = 0
) -> NativeKernels | None:
    """Start the native kernels' threads for products of up to `rows` rows; returns None if torch computes everything.

    Args:
        choice: `auto`, `torch`, or an instruction set.
        cores: number of threads.
        pin: whether each thread is pinned to a core.
        free_cores: number of cores kept free of these threads.
    """
    if choice == TORCH or not instruction_sets():
        return None
    return NativeKernels(rows, None if choice == AUTO else choice, cores, pin, free_cores)

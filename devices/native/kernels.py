"""The threads of the native library, and its products of bfloat16 rows with bfloat16 and quantised matrices."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch

from moesched.system.bound_call import bound_call
from moesched.system.cores import affinity, usable_cores

from ..shared.coded import Block, CodedRows, rows_of
from .arguments import ExpertWeights, OneExpert
from .compiled import formats, instruction_sets, library

Tensor = torch.Tensor
Blocks = Sequence[Block]


class NativeKernels:
    """The kernels of one instruction set, with threads of their own.

    The order in which an output is summed in float32 depends only on the instruction set, not on the other rows of the
    call, the row blocks or the number of threads. Outputs are rounded to bfloat16, and so are the activations that an
    expert multiplies by its matrix "down".

    Args:
        most_rows: the largest number of rows for which callers use these kernels.
        instruction_set: None for the best one of this processor.
        threads: number of threads, the caller included; by default the number of cores that this process may use.
        pin: True to pin each thread but the caller to a core of its own. The caller is never pinned, as threads that
            torch later starts from it would stay on the same core.
        free_cores: number of cores on which only the caller may run, where the system allows that.
    """

    def __init__(
        self,
        most_rows: int,
        instruction_set: str | None = None,
        threads: int | None = None,
        pin: bool = False,
        free_cores: int = 0,
    ) -> None:
        self._library = library()
        self.instruction_set = instruction_set or instruction_sets()[0]
        self.most_rows = most_rows
        helpers = (usable_cores() if threads is None else threads) - 1
        free_cores = max(free_cores, 1) if pin else free_cores
        cores = affinity()[free_cores:] if free_cores else []
        self._team = self._library.moesched_new_team(
            self.instruction_set.encode(), helpers, (ctypes.c_int * len(cores))(*cores), len(cores), pin
        )
        if not self._team:
            raise MemoryError("no memory for the threads of the CPU kernels")

    def close(self) -> None:
        """End the threads of the native kernels; a second call does nothing."""
        if self._team:
            self._library.moesched_free_team(self._team)
        self._team = None

    def linear(self, x_TD: Tensor, blocks: Blocks) -> Tensor:
        """Multiply rows by a matrix W that comes as row blocks: x @ W.T, (T, N)."""
        x_TD = _with_plain_rows(x_TD)
        y_TN = x_TD.new_empty(len(x_TD), _outputs(blocks))
        shape = (len(x_TD), x_TD.shape[1], y_TN.shape[1], x_TD.data_ptr(), x_TD.stride(0))
        matrix = matrix_of(blocks)
        if self._library.moesched_product(self._team, *shape, address(matrix), y_TN.data_ptr()):
            raise no_memory()
        return y_TN

    def linear_by_columns(self, x_TD: Tensor, blocks: Sequence[Tensor]) -> Tensor:
        """Multiply rows by W: x @ W.T, (T, N); W comes as column blocks (N, some of D) with contiguous columns."""
        x_TD = _with_plain_rows(x_TD)
        y_TN = x_TD.new_empty(len(x_TD), len(blocks[0]))
        shape = (len(x_TD), x_TD.shape[1], y_TN.shape[1], x_TD.data_ptr(), x_TD.stride(0))
        matrix = matrix_of([block.T for block in blocks])
        if self._library.moesched_columns(self._team, *shape, address(matrix), y_TN.data_ptr()):
            raise no_memory()
        return y_TN

    def expert(self, x_nD: Tensor, gate: Blocks, up: Blocks, down: Blocks) -> Tensor:
        """Run one expert on n rows: down @ (silu(gate @ x) * (up @ x)); returns (n, D)."""
        y_nD = x_nD.new_empty(x_nD.shape)
        self.prepared_expert(gate, up, down)(x_nD, y_nD)
        return y_nD

    def prepared_expert(self, gate: Blocks, up: Blocks, down: Blocks) -> Callable[[Tensor, Tensor], None]:
        """Return a function (x_nD, y_nD) -> None that runs an expert with these matrices on x, and writes to y.

        y must be contiguous. The caller must keep the weights alive as long as it uses the function.
        """
        matrices = [matrix_of(blocks) for blocks in (gate, up, down)]
        expert = OneExpert(
            hidden=_outputs(down), width=_outputs(gate), weights=ExpertWeights(*map(address, matrices))
        )
        return self.bound_expert(expert, matrices)

    def bound_expert(self, expert: OneExpert, held: object) -> Callable[[Tensor, Tensor], None]:
        """Return a function (x_nD, y_nD) -> None that runs an expert on x, and writes to y, which is contiguous.

        Args:
            expert: the arguments of the native call that do not depend on x.
            held: the objects to which these arguments point; the function keeps them alive.
        """
        return partial(_run_expert, self.bound(self._library.moesched_expert, expert), held)

    def call(self, function: Callable[..., int], arguments: ctypes.Structure) -> None:
        """Call a function of the library with the threads and a pointer to arguments.

        Raises:
            MemoryError: memory was lacking.
        """
        if function(self._team, ctypes.byref(arguments)):
            raise no_memory()

    def bound(self, function: Callable[..., int], arguments: ctypes.Structure) -> Callable[..., int]:
        """Return a function that calls `function` with the threads and a pointer to `arguments`; it returns the status.

        A status other than 0 means that memory was lacking; the caller then raises `no_memory()`. If `function` takes
        four more numbers or addresses, the returned function takes these; otherwise it takes no arguments.
        """
        return bound_call(function, self._team, arguments)


def _run_expert(run: Callable[..., int], held: object, x_nD: Tensor, y_nD: Tensor) -> None:
    x_nD = _with_plain_rows(x_nD)
    if run(x_nD.size(0), x_nD.stride(0), x_nD.data_ptr(), y_nD.data_ptr()):
        raise no_memory()


def _with_plain_rows(x_TD: Tensor) -> Tensor:
    return x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()


def _outputs(blocks: Blocks) -> int:
    return sum(len(block) for block in blocks)


def matrix_of(blocks: Blocks) -> array[int]:
    """Describe a matrix for C (`Matrix`): its format's number, then address and number of rows of each row block."""
    known = _numbers_of_formats()
    [number] = {known[block.format.name if isinstance(block, CodedRows) else block.dtype] for block in blocks}
    matrix = [number]
    for block in blocks:
        rows_ND = rows_of(block)
        matrix += rows_ND.data_ptr(), rows_ND.size(0)  # `len` of a tensor takes longer
    return array("q", matrix)


@cache
def _numbers_of_formats() -> dict[str | torch.dtype, int]:
    """Return C's number for each storage format: by the format's name, or by dtype for a format of plain numbers."""
    return {getattr(torch, name, name): number for number, name in enumerate(formats())}


def numbers(count: int) -> array[int]:
    """Make an array of `count` 64-bit zeros, whose address stays the same as long as no item is added.

    An array of ctypes would be slower: the code of ctypes would be read from memory again in each layer, since weights
    push this code out of the processor's caches.
    """
    return array("q", bytes(8 * count))


def address(numbers: array[int] | array[float]) -> int:
    """Return the address of an array of numbers; keep the array alive while C uses it."""
    return numbers.buffer_info()[0]


def no_memory() -> MemoryError:
    """Return the error for a native call whose status is not 0."""
    return MemoryError("no memory for the rows that the CPU kernels multiply")

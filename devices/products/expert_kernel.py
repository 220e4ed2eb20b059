"""The CPU expert kernel: products of a few rows by plain bfloat16 matrices, as fast as memory gives the weights.

`expert_kernel.c` is compiled when the package is installed, if there is a C compiler; otherwise torch is used. It is
called with data pointers through ctypes, which lets other Python threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any
from zlib import crc32

import torch

from moesched.errors import BadInput

from .linear import Blocks, Tensor
from .team import affinity, usable_cores

AUTO, TORCH = "auto", "torch"

_WHERE = Path(__file__).parent
_NOT_BUILT = "it was not compiled when moesched was installed: install GCC or Clang, then moesched again"


def _built() -> list[Path]:
    return sorted(_WHERE.glob("_expert_kernel*.so"))


@cache
def build() -> str:
    """The checksum of the compiled library; empty if it was not compiled."""
    return "".join(f"{crc32(path.read_bytes()):08x}" for path in _built()[:1])


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled library; None where there is none."""
    for path in _built():
        library = ctypes.CDLL(str(path))
        pointer, number, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
        library.moesched_variants.restype = text
        library.moesched_new_team.restype = pointer
        library.moesched_new_team.argtypes = [text, ctypes.c_int, pointer]
        library.moesched_free_team.restype = None
        library.moesched_free_team.argtypes = [pointer]
        shape: list[Any] = [pointer, number, number, number, pointer, number]
        library.moesched_product.argtypes = [*shape, text, pointer]
        library.moesched_expert.argtypes = [*shape, text, text, text, pointer]
        return library
    return None


def variants() -> list[str]:
    """The instruction sets that the kernel can use on this processor, best first; none where it was not compiled."""
    library = _library()
    return library.moesched_variants().decode().split() if library else []


def availability() -> str:
    """A sentence on whether the kernel is installed."""
    here = variants()
    return (
        f"CPU expert kernel: {here[0]}" if here else f"no CPU expert kernel, torch does without: {_NOT_BUILT}"
    )


def check_choice(kernel: str) -> None:
    """Check a choice of kernel: `auto`, `torch` for none, or an instruction set.

    Raises:
        BadInput: this machine has no such kernel.
    """
    here = variants()
    if kernel not in (AUTO, TORCH, *here):
        because = "" if here else f"; the CPU expert kernel cannot be used: {_NOT_BUILT}"
        raise BadInput(f"kernel is {kernel!r}: give one of {', '.join((AUTO, TORCH, *here))}{because}")


class ExpertKernel:
    """The kernel with threads of its own.

    An output's float32 sum runs in an order that depends only on the instruction set: not on the other rows of the
    call, the row blocks or the number of threads. Outputs are rounded to bfloat16, and so is the input of `expert`'s
    down projection.

    Args:
        most_rows: most rows of a product for which `takes` is true.
        variant: the instruction set; by default the best one here.
        threads: number of threads, the caller included.
        pin: pin each helper to a core of its own. The caller is never pinned: threads that torch later starts from it
            would stay on the same core.
    """

    def __init__(
        self, most_rows: int, variant: str | None = None, threads: int | None = None, pin: bool = False
    ) -> None:
        library = _library()
        assert library is not None, _NOT_BUILT
        self._library = library
        self.variant = variants()[0] if variant is None else variant
        self.most_rows = min(most_rows, library.moesched_most_batch())
        helpers = (usable_cores() if threads is None else threads) - 1
        cores = (ctypes.c_int * helpers)(*affinity()[1 : helpers + 1]) if pin else None
        self._team = library.moesched_new_team(self.variant.encode(), helpers, cores)
        if not self._team:
            raise MemoryError("no memory for the threads of the expert kernel")

    def close(self) -> None:
        """End the threads."""
        self._library.moesched_free_team(self._team)
        self._team = None

    def takes(self, x_TD: Tensor, blocks: Blocks) -> bool:
        """Whether the kernel takes a product: few rows by a plain bfloat16 matrix in row blocks, on the CPU."""
        few = 0 < len(x_TD) <= self.most_rows
        return few and x_TD.dtype == torch.bfloat16 and x_TD.is_cpu and _are_rows(blocks, x_TD.shape[1])

    def takes_expert(self, x_nD: Tensor, gate: Blocks, up: Blocks, down: Blocks) -> bool:
        """The same for a whole expert."""
        return self.takes(x_nD, gate) and self.takes(x_nD, up) and _are_rows(down, _outputs(gate))

    def linear(self, x_TD: Tensor, blocks: Blocks) -> Tensor:
        """x times the transpose of the matrix that the row blocks make: (T, N)."""
        x_TD = _with_plain_rows(x_TD)
        y_TN = x_TD.new_empty(len(x_TD), _outputs(blocks))
        shape = (len(x_TD), x_TD.shape[1], y_TN.shape[1], x_TD.data_ptr(), x_TD.stride(0))
        _check(self._library.moesched_product(self._team, *shape, _addresses(blocks), y_TN.data_ptr()))
        return y_TN

    def expert(self, x_nD: Tensor, gate: Blocks, up: Blocks, down: Blocks) -> Tensor:
        """One expert on its rows: silu(gate x) * up x, brought back to the hidden size by down."""
        x_nD = _with_plain_rows(x_nD)
        y_nD = x_nD.new_empty(x_nD.shape)
        shape = (len(x_nD), x_nD.shape[1], _outputs(gate), x_nD.data_ptr(), x_nD.stride(0))
        matrices = (_addresses(gate), _addresses(up), _addresses(down))
        _check(self._library.moesched_expert(self._team, *shape, *matrices, y_nD.data_ptr()))
        return y_nD


def _with_plain_rows(x_TD: Tensor) -> Tensor:
    return x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()


def _are_rows(blocks: Blocks, inputs: int) -> bool:
    return all(
        block.dtype == torch.bfloat16
        and block.is_cpu
        and not block.is_mkldnn
        and block.shape[1] == inputs
        and block.is_contiguous()
        for block in blocks
    )


def _outputs(blocks: Blocks) -> int:
    return sum(len(block) for block in blocks)


def _addresses(blocks: Sequence[Tensor]) -> bytes:
    """An array of `Rows`, as C reads it."""
    return struct.pack(f"={'Qq' * len(blocks)}", *chain(*((each.data_ptr(), len(each)) for each in blocks)))


def _check(result: int) -> None:
    if result:
        raise MemoryError("no memory for the rows that the expert kernel multiplies")

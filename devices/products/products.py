"""Products and experts by the CPU expert kernel where it is faster, by torch everywhere else."""

from __future__ import annotations

from ..native.compiled import AUTO, TORCH, check_choice, instruction_sets
from ..native.kernels import NativeKernels
from .crossover import Shape, most_rows
from .linear import Blocks, Tensor, expert_ffn, linear


class Products:
    """Multiplies by weights; the choice depends on the number of rows and the weights' layout, never on the policy.

    kernel: multiplies few rows; None for torch alone, and when it is closed.
    """

    def __init__(self, kernel: NativeKernels | None = None) -> None:
        self.kernel = kernel

    @property
    def most_rows(self) -> int:
        """Most rows that the kernel takes, on threads of its own."""
        return self.kernel.most_rows if self.kernel else 0

    def close(self) -> None:
        """End the kernel's threads."""
        if self.kernel:
            self.kernel.close()
            self.kernel = None

    def linear(self, x_TD: Tensor, blocks: Blocks) -> Tensor:
        """x times the transpose of the matrix that the blocks make: (T, N)."""
        if self.kernel and self.kernel.takes(x_TD, blocks):
            return self.kernel.linear(x_TD, blocks)
        return linear(x_TD, blocks)

    def by_kernel(self, x_nD: Tensor, gate: Blocks, up: Blocks, down: Blocks) -> bool:
        """Whether the kernel computes an expert on these rows: then no row's bits depend on another row."""
        return self.kernel is not None and self.kernel.takes_expert(x_nD, gate, up, down)

    def expert(
        self, x_nD: Tensor, gate: Blocks, up: Blocks, down: Blocks, kept: slice | None = None
    ) -> Tensor:
        """One expert on its rows: silu(gate x) * up x, brought back to the hidden size by down.

        kept: the rows whose outputs are wanted; None for all of them. Torch computes the others, too, since the last
            bits of its products depend on the other rows; the kernel's do not.
        """
        if self.kernel and self.kernel.takes_expert(x_nD, gate, up, down):
            return self.kernel.expert(x_nD if kept is None else x_nD[kept], gate, up, down)
        y_nD = expert_ffn(x_nD, gate, up, down)
        return y_nD if kept is None else y_nD[kept]

    def expert_into(
        self, y_nD: Tensor, x_nD: Tensor, gate: Blocks, up: Blocks, down: Blocks, kept: slice | None = None
    ) -> None:
        """Write an expert's outputs of the wanted rows to y, contiguous; the kernel computes them there.

        kept: as for `expert`.
        """
        if self.kernel and self.kernel.takes_expert(x_nD, gate, up, down):
            self.kernel.expert(x_nD if kept is None else x_nD[kept], gate, up, down, y_nD=y_nD)
        else:
            y_nD.copy_(self.expert(x_nD, gate, up, down, kept))


def rows_for_kernel(kernel: str, dtype: str, shape: Shape, packed: bool) -> int:
    """The most rows for which a chosen kernel is used; 0 where it is not used at all.

    Args:
        kernel: `auto`, `torch`, or an instruction set.
        shape: of the matrices that most weights are in.
        packed: whether torch would multiply by packed weights.

    Raises:
        BadInput: there is no such kernel here.
    """
    check_choice(kernel)
    if kernel == TORCH or dtype != "bfloat16" or not instruction_sets():
        return 0
    return most_rows(instruction_sets()[0] if kernel == AUTO else kernel, shape, packed)


def make_kernel(kernel: str, rows: int, cores: int, pin: bool = False, left: int = 0) -> NativeKernels | None:
    """The kernels, with their threads, for products of up to `rows` rows; None where torch does everything.

    cores, pin, left: as for `NativeKernels`.
    """
    if kernel == TORCH or not instruction_sets():
        return None
    return NativeKernels(rows, None if kernel == AUTO else kernel, cores, pin, left)

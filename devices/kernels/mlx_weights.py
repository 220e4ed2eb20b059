"""Weights for MLX's kernels: arrays by name, and experts in stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from moesched.models.layers import Layer

from .kernel_weights import KernelWeights
from .mlx_functions import Array
from .seam import EXPERT_MATRICES, ROWS, STACK, Operation

ALL_ROWS, ALL_STACKED = frozenset({ROWS}), frozenset({ROWS, STACK})


class Arrays(KernelWeights[Array]):
    """Arrays by name, each as a list of blocks (D, some of N columns) of a transposed matrix.

    In a stack, which holds the matrices of several experts, blocks are (E experts, D, some of N).

    Args:
        experts: for each expert of the layer: the stack that holds it, and its index in that stack.

    Attributes:
        stack: the stack that holds all experts of the layer; None if the experts are in several stacks or in none.
    """

    def __init__(
        self,
        blocks: Mapping[str, Sequence[Array]] = MappingProxyType({}),
        layer: Layer | None = None,
        experts: Mapping[int, tuple[Arrays, int]] = MappingProxyType({}),
    ) -> None:
        super().__init__(blocks, layer)
        self.experts = experts
        stacks = {stack.number: stack for stack, _ in experts.values()}
        self.stack = next(iter(stacks.values())) if len(stacks) == 1 else None

    def formats(self, operation: Operation) -> frozenset[str]:
        """Return the storage formats of the blocks of all matrices that an operation reads."""
        if operation.matrices == EXPERT_MATRICES or (self.stack is not None and not operation.matrices):
            return ALL_STACKED
        return ALL_ROWS


def stack_of(parts: Mapping[str, Sequence[Array]], layer: Layer) -> Arrays:
    """Make a stack of experts from blocks in the form of a checkpoint's files; matrices are transposed for MLX.

    parts: the blocks of gate, up and down by name: (E, some of N, D), or (E, some of D, N) for a transposed down.
    """
    transposed = layer.feed_forward.transposed_down
    turned = {
        part: [block if part == "down" and transposed else block.swapaxes(-1, -2) for block in blocks]
        for part, blocks in parts.items()
    }
    return Arrays(turned, layer)

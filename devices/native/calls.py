"""Native calls whose arguments are prepared: made once for a shape, and again in every step that has it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import torch

from .arguments import Head, LayerWeights, Tokens
from .compiled import library
from .kernels import NativeKernels, Tensor, address, check, numbers

MOST_KEPT = 512
"""Calls of one kernel that a micro-batch keeps. Streamed weights have new pointers in every step."""

Call = Callable[[], int]
"""A native call with its arguments; returns what `check` takes."""


class Calls(dict[int, Call]):
    """Calls of one kernel, by the number of the weights that they read."""

    def keep(self, weights: LayerWeights, call: Call) -> None:
        """Keep a call for the next step."""
        if len(self) >= MOST_KEPT:
            self.clear()
        self[weights.number] = call


class EmbeddingCall:
    """The call that embeds tokens, with memory for their ids and positions."""

    def __init__(self, kernels: NativeKernels, arguments: Tokens) -> None:
        ids, positions = numbers(arguments.tokens), numbers(arguments.tokens)
        arguments.ids, arguments.positions = address(ids), address(positions)
        self._ids, self._positions = memoryview(ids), memoryview(positions)  # which keep their size
        self._embedding_VD: Tensor | None = None
        self._arguments = arguments
        self._run = kernels.bound(library().moesched_embed, arguments)

    def __call__(self, ids: Sequence[int], positions: Sequence[int], embedding_VD: Tensor) -> None:
        self._ids[:], self._positions[:] = array("q", ids), array("q", positions)
        if embedding_VD is not self._embedding_VD:
            self._embedding_VD, self._arguments.embedding = embedding_VD, embedding_VD.data_ptr()
        check(self._run())


class HeadCall:
    """The call for the logits of some rows, with memory for them.

    Attributes:
        logits_RV: of each row, float32.
    """

    def __init__(
        self, kernels: NativeKernels, arguments: Head, hidden_TD: Tensor, rows: Sequence[int]
    ) -> None:
        self._chosen = array("q", rows)
        self._likeliest = numbers(len(rows))
        self.logits_RV = torch.empty(len(rows), arguments.vocabulary)
        arguments.rows, arguments.x, arguments.chosen = len(rows), hidden_TD.data_ptr(), address(self._chosen)
        arguments.logits, arguments.likeliest = self.logits_RV.data_ptr(), address(self._likeliest)
        self._run = kernels.bound(library().moesched_logits, arguments)

    def __call__(self) -> list[int]:
        """Compute the logits; returns the likeliest token of each row, -1 if its logits are not finite."""
        check(self._run())
        return self._likeliest.tolist()

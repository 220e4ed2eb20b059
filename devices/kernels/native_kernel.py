"""The base classes of the native library's kernels: they hold its threads, and refuse cases that the library lacks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from moesched.models.config import ModelConfig

from ..native.compiled import formats, why_unusable
from ..native.kernels import NativeKernels
from .layer_weights import Tensor
from .native_preparation import Preparation
from .resources import Resources
from .seam import CODED, ROWS, Case, Kernel
from .workspace import Workspace

BFLOAT16 = torch.bfloat16
MOST_GROUPS = 64
"""Largest number of groups of experts that a router may have, as in moe_layer.c."""


class LibraryKernel(Kernel):
    """The base of the native library's kernels. A row's bits depend on no other row, only on the instruction set."""

    name = "native"
    independent = True
    has_threads = True

    def __init__(self, resources: Resources) -> None:
        assert resources.threads is not None, "the library is there"
        self._threads: NativeKernels = resources.threads
        self.name = f"native {self._threads.instruction_set}"

    @classmethod
    def problem(cls) -> str | None:
        """Return the reason why the native library cannot be used: it is missing or does not load; None if it can."""
        return why_unusable() or None


class NativeKernel(LibraryKernel):
    """The base of the native library's kernels for bfloat16 models, for all operations but attention."""

    takes = "rows of bfloat16 by coded weights, and few by bfloat16 ones, on a CPU"

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources)
        self._config: ModelConfig = resources.config
        self._prepare = Preparation(resources.config)

    def refusal(self, case: Case) -> str:
        """Return the reason why a case is refused; empty if the kernel takes the case.

        Refused are cases that the library lacks, and numbers of rows above the limit from which torch is faster.
        """
        if case.device != "cpu":
            return "it is for the CPU"
        if case.dtype != "bfloat16":
            return "it multiplies bfloat16 numbers"
        coded = case.formats - {ROWS}
        if not coded <= set(formats()):
            return f"it reads plain rows and {', '.join(sorted(CODED & set(formats())))}"
        if not case.rows:
            return "it multiplies rows"
        if not coded and case.rows > self._threads.most_rows:
            return f"torch is faster from {self._threads.most_rows + 1} rows on"
        if case.layer is not None and case.layer.feed_forward.router.groups > MOST_GROUPS:
            return f"its routers have at most {MOST_GROUPS} groups"
        return ""

    def _bound(self, function: Callable[..., int], arguments: ctypes.Structure) -> Callable[[], int]:
        return self._threads.bound(function, arguments)


class NativeMemoryKernel(NativeKernel):
    """The base of native kernels that write their results to the memory (`Workspace`) of a micro-batch."""

    uses_memory = True


def hidden_states(memory: Workspace, config: ModelConfig) -> Tensor:
    """Return the tensor of hidden states (T, D) in a micro-batch's memory; the kernels of all layers write to it."""
    return memory.tensor("hidden", memory.rows, config.hidden, dtype=BFLOAT16)

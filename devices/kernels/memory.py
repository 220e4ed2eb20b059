"""A micro-batch's memory for the results of kernels, and the kernels that are bound to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch

from moesched.models.footprint import KEPT_ROWS

from .seam import Bound

MOST_BOUND = 2048
"""Bound kernels that a micro-batch keeps. Streamed weights are new ones in every step."""


class Scratch:
    """Tensors by name that all micro-batches share: a kernel's intermediate results.

    Kernels that use it run in one order, that of a stream or a thread.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def tensor(
        self, name: str, *shape: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> torch.Tensor:
        """A tensor at the start of the memory of a name, which grows to the largest one."""
        size = math.prod(shape)
        found = self._tensors.get(name)
        if found is None or len(found) < size:
            found = self._tensors[name] = _allocated(size, dtype=dtype, device=device)
        return found[:size].view(shape)


class Memory:
    """Tensors by name for a number of rows, which kernels share from layer to layer.

    Args:
        scratch: memory for intermediate results; by default its own.
        tensors: tensors that exist already, by name.

    Attributes:
        rows: the number of rows.
        kept: whether a micro-batch keeps this memory, and the kernels bound to it, for later steps.
        scratch: memory for intermediate results.
        bound: returns the kernel that was kept by a key; None if there is none.
        decodes: whether the step that uses it decodes.
        step: what a device keeps of the calls of such a step.
    """

    def __init__(self, rows: int, scratch: Scratch | None = None, **tensors: torch.Tensor) -> None:
        self.rows = rows
        self.scratch = scratch or Scratch()
        self.kept = rows <= KEPT_ROWS
        self.decodes = False
        self.step: Any = None
        self._tensors = tensors
        self._bound: dict[Hashable, Bound] = {}
        self.bound: Callable[[Hashable], Bound | None] = self._bound.get

    def tensor(
        self,
        name: str,
        *shape: int,
        dtype: torch.dtype,
        zero: bool = False,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """The tensor of a name, by default on the host; allocated by the first call, and by one for another shape.

        zero: fill it with zeros when it is allocated.
        """
        found = self._tensors.get(name)
        if found is None or found.shape != shape:
            found = self._tensors[name] = _allocated(*shape, dtype=dtype, device=device, zero=zero)
        return found

    def keep(self, key: Hashable, bound: Bound) -> None:
        """Keep a bound kernel for the next steps, by a key."""
        if self.kept:
            if len(self._bound) >= MOST_BOUND:
                self._bound.clear()
            self._bound[key] = bound


class SharedMemory(Memory):
    """Memory for results that nothing reads after the next call for any micro-batch, but for the tensors given."""

    def tensor(
        self,
        name: str,
        *shape: int,
        dtype: torch.dtype,
        zero: bool = False,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """The tensor that was given by a name, or the shared one."""
        given = self._tensors.get(name)
        return given if given is not None else self.scratch.tensor(name, *shape, dtype=dtype, device=device)


def _allocated(
    *shape: int, dtype: torch.dtype, device: torch.device | None, zero: bool = False
) -> torch.Tensor:
    """A new tensor that kernels may write to in torch's inference mode and outside of it."""
    with torch.inference_mode(False):
        return (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device=device)

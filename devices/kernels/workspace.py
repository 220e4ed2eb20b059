"""The workspace of kernels: named tensors for the results of a micro-batch's kernels, and the kernels bound to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import Any

import torch

from moesched.models.footprint import KEPT_ROWS

from .seam import Bound

MOST_BOUND = 2048
"""Largest number of bound kernels that a workspace keeps; streamed weights are bound anew in each step."""


class Scratch:
    """Tensors by name for intermediate results of kernels; all micro-batches share them.

    Kernels that use these tensors must run one after the other, on one stream or thread.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def tensor(
        self, name: str, *shape: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> torch.Tensor:
        """Return a tensor of this shape in the memory that is kept under a name; its contents are undefined.

        Memory that is too small or has another dtype is replaced. All calls with one name must have the same device.
        """
        size = math.prod(shape)
        found = self._tensors.get(name)
        if found is None or len(found) < size or found.dtype != dtype:
            found = self._tensors[name] = _allocated(size, dtype=dtype, device=device)
        return found[:size].view(shape)


class Workspace:
    """Tensors by name for the results of a step's kernels; the kernels of all layers write to the same tensors.

    Args:
        rows: number of tokens in the step.
        scratch: memory for intermediate results; None for new memory.
        tensors: tensors that exist already, by name.

    Attributes:
        rows: number of tokens in the step.
        kept: True if a micro-batch keeps this memory and the kernels bound to it for later steps.
        scratch: memory for intermediate results.
        bound: function that takes a key, and returns the bound kernel that is kept under this key, or None.
        decodes: True in a decode step.
        step: the record that a device makes of a decode step's kernel calls, to replay them later; None without one.
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
        """Return the tensor of this name; allocate it if there is none yet, or only one of another shape or dtype.

        Args:
            zero: True to fill the tensor with zeros when it is allocated.
            device: None for the host.
        """
        found = self._tensors.get(name)
        if found is None or found.shape != shape or found.dtype != dtype:
            found = self._tensors[name] = _allocated(*shape, dtype=dtype, device=device, zero=zero)
        return found

    def keep(self, key: Hashable, bound: Bound) -> None:
        """Keep a bound kernel under a key for the next steps; does nothing unless a micro-batch keeps this memory."""
        if self.kept:
            if len(self._bound) >= MOST_BOUND:
                self._bound.clear()
            self._bound[key] = bound


class SharedMemory(Workspace):
    """A workspace that takes its tensors from `scratch`, so that the next user of `scratch` overwrites them.

    The tensors that the constructor gets as `tensors` are used as they are, and not taken from `scratch`.
    """

    def tensor(
        self,
        name: str,
        *shape: int,
        dtype: torch.dtype,
        zero: bool = False,
        device: torch.device | None = None,
    ) -> torch.Tensor:
        """Return the tensor that was given under this name, or else one in the scratch; `zero` must be False."""
        given = self._tensors.get(name)
        return given if given is not None else self.scratch.tensor(name, *shape, dtype=dtype, device=device)


def _allocated(
    *shape: int, dtype: torch.dtype, device: torch.device | None, zero: bool = False
) -> torch.Tensor:
    """Allocate a tensor that kernels may write to in torch's inference mode and outside of it."""
    with torch.inference_mode(False):
        return (torch.zeros if zero else torch.empty)(shape, dtype=dtype, device=device)

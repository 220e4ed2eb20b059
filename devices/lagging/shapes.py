"""The shapes of the results of torch's calls, found once for arguments of equal shapes.

A first call is made on zeros of the host. On torch's device "meta" many calls run in Python and import torch's
compiler: that takes a second, and each later search for garbage looks at its objects, too.
"""

from __future__ import annotations

from collections.abc import Callable
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

Call = Callable[..., Any]

MOST = 20_000
"""Largest number of shapes that are remembered."""


class Shape(NamedTuple):
    """The shape, strides, offset and dtype of a call's result.

    Attributes:
        nbytes: bytes of the storage that the result is in.
        operand: index of the tensor argument whose storage the result shares; -1 if the result has new storage.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    nbytes: int
    operand: int


class Results(NamedTuple):
    """The results of a call: shapes of tensors, other values as they are; nested as the structure says."""

    leaves: list[Any]
    structure: TreeSpec


class Shapes:
    """Remembers the shapes of a call's results, by the function and the shapes of its arguments."""

    def __init__(self) -> None:
        self._known: dict[Any, Shape | Results] = {}

    def of(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of a call as tensors without values, on torch's device "meta".

        Args:
            func: the function, such as `torch.add`.
            args, kwargs: its arguments, with tensors on the device "meta" where values do not matter; the argument
                `device` is the CPU.
        """
        operands: list[torch.Tensor] = []
        key = known = None
        try:
            key = (func, _signature(args, operands), _signature(kwargs, operands))
            known = self._known.get(key)
        except TypeError:  # an argument that is no key
            key = None
        if known is None:
            operands.clear()
            known = _tried(func, args, kwargs, operands)
            if key is not None and len(self._known) < MOST:
                self._known[key] = known
        if isinstance(known, Shape):
            return _made(known, operands)
        made = [_made(each, operands) if isinstance(each, Shape) else each for each in known.leaves]
        return tree_unflatten(made, known.structure)


def _signature(of: Any, operands: list[torch.Tensor]) -> Any:
    """Make a key from the arguments of a call: calls with equal keys have results of equal shapes.

    Args:
        of: the arguments, nested in tuples, lists or mappings.
        operands: a list to which the tensors among the arguments are appended.

    Raises:
        TypeError: a tensor has values (is not on the device "meta"), so that the shape may depend on these.
    """
    if isinstance(of, torch.Tensor):
        if of.device.type != "meta":
            raise TypeError  # its value may matter
        operands.append(of)
        same = _first(of, operands) if len(operands) > 1 else 0
        return of.size(), of.stride(), of.storage_offset(), of.dtype, same
    if isinstance(of, tuple | list):
        return type(of), tuple([_signature(each, operands) for each in of])
    if isinstance(of, dict):
        return tuple([(name, _signature(each, operands)) for name, each in of.items()])
    if isinstance(of, slice):
        return "slice", of.start, of.stop, of.step
    return type(of), of


def _first(tensor: torch.Tensor, operands: list[torch.Tensor]) -> int:
    """Return the index of the first tensor in `operands` that has the same storage as `tensor`."""
    memory = tensor.untyped_storage()._cdata
    return next(number for number, each in enumerate(operands) if each.untyped_storage()._cdata == memory)


def _tried(
    func: Call, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[torch.Tensor]
) -> Shape | Results:
    """Call a function with zeros for the tensors without values; returns the shapes of its results.

    operands: a list to which those tensors are appended.
    """
    memory: dict[int, torch.Tensor] = {}
    zeros: list[torch.Tensor] = []

    def on_host(of: Any) -> Any:
        if isinstance(of, torch.Tensor) and of.device.type == "meta":
            operands.append(of)
            zeros.append(_zeros(of, memory))
            return zeros[-1]
        if isinstance(of, tuple | list):
            return type(of)([on_host(each) for each in of])
        if isinstance(of, dict):
            return {name: on_host(each) for name, each in of.items()}
        return of

    results = func(*on_host(args), **on_host(kwargs))
    if isinstance(results, torch.Tensor):
        return _shape(results, zeros)
    leaves, structure = tree_flatten(results)
    return Results(
        [_shape(each, zeros) if isinstance(each, torch.Tensor) else each for each in leaves], structure
    )


def _zeros(like: torch.Tensor, memory: dict[int, torch.Tensor]) -> torch.Tensor:
    """Make a tensor of zeros with the dtype, shape, strides and offset of the tensor `like`.

    memory: the bytes for each storage, so that tensors that share one go on to do so.
    """
    storage = like.untyped_storage()
    if storage._cdata not in memory:
        # The system clears pages when they are touched: of an arena of megabytes a call touches few.
        pages = mmap(-1, storage.nbytes() // PAGESIZE * PAGESIZE + PAGESIZE, MAP_PRIVATE | MAP_ANONYMOUS)
        memory[storage._cdata] = torch.frombuffer(pages, dtype=torch.uint8)
    whole = memory[storage._cdata].view(like.dtype)
    return whole.as_strided(like.size(), like.stride(), like.storage_offset())


def _shape(result: torch.Tensor, operands: list[torch.Tensor]) -> Shape:
    operand = _first(result, [*operands, result])
    return Shape(
        tuple(result.size()),
        tuple(result.stride()),
        int(result.storage_offset()),
        result.dtype,
        result.untyped_storage().nbytes(),
        -1 if operand == len(operands) else operand,
    )


def _made(shape: Shape, operands: list[torch.Tensor]) -> torch.Tensor:
    if shape.operand >= 0:
        whole = operands[shape.operand]
        if whole.dtype == shape.dtype:
            return whole.as_strided(shape.size, shape.stride, shape.offset)
        memory = whole.as_strided((0,), (1,), 0).view(shape.dtype)
    else:
        memory = torch.empty(shape.nbytes, dtype=torch.uint8, device="meta").view(shape.dtype)
    return memory.as_strided(shape.size, shape.stride, shape.offset)

"""A cache of the shapes of the results of torch's calls.

On tiny tensors, finding a shape by torch takes longer than the call itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

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


class Shapes:
    """Remembers the shape of a call's result, by the function and the shapes of its arguments."""

    def __init__(self) -> None:
        self._known: dict[Any, Shape] = {}

    def of(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the results of a call as tensors without values, on torch's device "meta".

        The function is called on that device only for the first call with given shapes.

        Args:
            func: the function, such as `torch.add`.
            args, kwargs: its arguments, with tensors on the device "meta".
        """
        operands: list[torch.Tensor] = []
        try:
            key = (func, _signature(args, operands), _signature(kwargs, operands))
            known = self._known.get(key)
        except TypeError:  # an argument that is no key
            return func(*args, **kwargs)
        if known is not None:
            return _made(known, operands)
        results = func(*args, **kwargs)
        if isinstance(results, torch.Tensor) and len(self._known) < MOST:
            self._known[key] = _shape(results, operands)
        return results


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
        return of.size(), of.stride(), of.storage_offset(), of.dtype, _first(of, operands)
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

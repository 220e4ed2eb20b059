"""The shapes of the results of torch's calls, found only once for arguments of equal shapes.

To find them, the call is made on zeros in the host's memory. Torch's device "meta" is not used for this: there, many
calls run in Python and import torch's compiler, which takes a second and makes each later garbage collection slower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from .memory import Block, Form

Call = Callable[..., Any]

MOST = 20_000
"""Largest number of shapes that are remembered."""


class Operand(Protocol):
    """The interface of a GPU tensor among the arguments of a call; `LaggingTensor` describes its attributes."""

    block: Block
    values_now: torch.Tensor
    form: Form


class Result(NamedTuple):
    """A tensor that a call returns.

    Attributes:
        form: the tensor's dtype, shape, and place in the memory that it is in.
        nbytes: bytes of this memory.
        operand: index, among the GPU tensors in the arguments, of the one whose memory the result shares; -1 if the
            result has new memory.
    """

    form: Form
    nbytes: int
    operand: int


class Results(NamedTuple):
    """All that a call returns.

    Attributes:
        leaves: the values without their nesting: a `Result` for each tensor, other values as they are.
        structure: the nesting of the values in tuples, lists and mappings.
    """

    leaves: list[Any]
    structure: TreeSpec


class Shapes:
    """Remembers the shapes of a call's results, by the function and the shapes of its arguments."""

    def __init__(self) -> None:
        self._known: dict[Any, Result | Results] = {}

    def of(
        self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any, operands: Sequence[Operand]
    ) -> Result | Results:
        """Return a description of a call's results: their shapes and memory, but not the numbers in the tensors.

        Args:
            func: the function, such as `torch.add`.
            args, kwargs: the arguments; in place of each GPU tensor, its CPU tensor `values_now`.
            key: a function's calls with equal keys have results of equal shapes. If shapes may depend on values, the
                key is not hashable, and the shapes are not remembered.
            operands: the GPU tensors among the arguments.
        """
        try:
            known = self._known.get((func, key))
        except TypeError:
            return _tried(func, args, kwargs, operands)
        if known is None:
            known = _tried(func, args, kwargs, operands)
            if len(self._known) < MOST:
                self._known[func, key] = known
        return known


def _tried(
    func: Call, args: tuple[Any, ...], kwargs: dict[str, Any], operands: Sequence[Operand]
) -> Result | Results:
    """Call a function with zeros in place of its GPU tensors; returns a description of the results.

    The arguments are those of `Shapes.of`.
    """
    memory: dict[Block, torch.Tensor] = {}
    zeros = {id(each.values_now): _zeros(each, memory) for each in operands}

    def on_zeros(of: Any) -> Any:
        if isinstance(of, torch.Tensor):
            return zeros.get(id(of), of)
        if isinstance(of, tuple | list):
            return type(of)([on_zeros(each) for each in of])
        if isinstance(of, dict):
            return {name: on_zeros(each) for name, each in of.items()}
        return of

    returned = func(*on_zeros(args), **on_zeros(kwargs))
    of_storages = {_storage(memory[each.block]): number for number, each in reversed([*enumerate(operands)])}
    if isinstance(returned, torch.Tensor):
        return _result(returned, of_storages)
    leaves, structure = tree_flatten(returned)
    return Results(
        [_result(each, of_storages) if isinstance(each, torch.Tensor) else each for each in leaves], structure
    )


def _zeros(like: Operand, memory: dict[Block, torch.Tensor]) -> torch.Tensor:
    """Make a tensor of zeros with the form of a GPU tensor.

    memory: the zeros made so far, by block; tensors in the same block get the same zeros.
    """
    if like.block not in memory:
        # The system clears pages when they are touched: of an arena of megabytes a call touches few.
        pages = mmap(-1, like.block.nbytes // PAGESIZE * PAGESIZE + PAGESIZE, MAP_PRIVATE | MAP_ANONYMOUS)
        memory[like.block] = torch.frombuffer(pages, dtype=torch.uint8)
    size, stride, offset, dtype = like.form
    return memory[like.block].view(dtype).as_strided(size, stride, offset)


def _result(tensor: torch.Tensor, of_storages: Mapping[int, int]) -> Result:
    """Describe a tensor that a call on zeros returned.

    of_storages: maps the address of each torch storage of zeros to the index of the first GPU tensor that lies in it.
    """
    form = Form.of(tensor, int(tensor.storage_offset()))
    return Result(form, tensor.untyped_storage().nbytes(), of_storages.get(_storage(tensor), -1))


def _storage(tensor: torch.Tensor) -> int:
    number: int = tensor.untyped_storage()._cdata
    return number

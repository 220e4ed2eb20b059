"""Options that several jobs share, with their defaults, and helpers for functions that take them as keywords.

A job's options are a frozen dataclass. A `TypedDict` beside it tells editors and type checkers the keywords; a test
compares the two.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from textwrap import fill
from typing import Any, TypedDict, TypeVar

from moesched.errors import BadInput
from moesched.inputs.chosen_policy import PolicyGiven
from moesched.inputs.defaults import DEVICE
from moesched.machines import Machine
from moesched.seams import Device

MOST = {"batch_size": 65_536, "micro_batch_size": 65_536, "prefill_chunk": 10**8}
"""Limits of SizeOptions."""

WIDTH = 120
"""Columns of docstrings."""

Options = TypeVar("Options")
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class SettingOptions:
    """The policy's settings, and the number format of the computation.

    Attributes:
        settings: the policy's own settings, by name; the others keep the policy's defaults.
        dtype: "float32", "bfloat16" or "float16"; None for the model's own, or float16 on a GPU without bfloat16.
    """

    settings: Mapping[str, Any] | None = None
    dtype: str | None = None


class SettingKeywords(TypedDict, total=False):
    """Keywords of SettingOptions."""

    settings: Mapping[str, Any] | None
    dtype: str | None


@dataclass(frozen=True, kw_only=True)
class FormatOptions:
    """The storage format of the weights.

    Attributes:
        format: a name of docs/models.md, such as "q4_k_m"; None for the one that the model is published in.
    """

    format: str | None = None


class FormatKeywords(TypedDict, total=False):
    """Keywords of FormatOptions."""

    format: str | None


@dataclass(frozen=True, kw_only=True)
class PolicyOptions(SettingOptions):
    """The policy, with its settings.

    Attributes:
        policy: a name of `moesched list policies`, module:Class, file.py:Class, a class, or an object, which is
            copied for each batch.
    """

    policy: PolicyGiven


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """Sizes of batches; the planner chooses those that are None.

    Attributes:
        batch_size: requests that run together.
        micro_batch_size: requests that share a kernel.
        prefill_chunk: largest number of prompt tokens that pass a layer together; None for all of a micro-batch, or as
            many as fit.
    """

    batch_size: int | None = None
    micro_batch_size: int | None = None
    prefill_chunk: int | None = None

    @property
    def sizes(self) -> SizeOptions:
        """Only these options."""
        return SizeOptions(**part_of(self, SizeOptions))

    def require_sensible(self) -> None:
        """Raise BadInput where a size is below 1, or so large that planning would not end."""
        for field in fields(SizeOptions):
            size, most = getattr(self, field.name), MOST[field.name]
            if size is not None and not 1 <= size <= most:
                raise BadInput(f"--{field.name.replace('_', '-')} is {size:,}: give 1 to {most:,}")


class SizeKeywords(TypedDict, total=False):
    """Keywords of SizeOptions."""

    batch_size: int | None
    micro_batch_size: int | None
    prefill_chunk: int | None


@dataclass(frozen=True, kw_only=True)
class MachineOptions:
    """The machine, and the memory budgets on it.

    Attributes:
        machine: "auto" for this one, a name of `moesched list machines`, a TOML file, or a Machine.
        budgets: bytes of weights, KV cache and buffers by memory, as numbers or text such as "600MB"; by default the
            machine's capacity. A budget of a memory that accelerators share is for all of them. "process" instead of
            the host's memory limits the process's resident bytes, with Python and libraries. "pinned" limits the
            page-locked memory of a machine with a GPU: pages then pass through it.
    """

    machine: Machine | str
    budgets: Mapping[str, int | str] | None = None


class MachineKeywords(TypedDict, total=False):
    """Keywords of MachineOptions that have a default."""

    budgets: Mapping[str, int | str] | None


@dataclass(frozen=True, kw_only=True)
class CutOptions:
    """The accelerators that share a model.

    Attributes:
        tensor_parallel: number of the machine's equal accelerators over which the model is cut; None for all.
    """

    tensor_parallel: int | None = None


class CutKeywords(TypedDict, total=False):
    """Keywords of CutOptions."""

    tensor_parallel: int | None


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """The device that computes.

    Attributes:
        device: a name of `moesched list devices`, module:Class, file.py:Class, or a class.
        device_settings: the device's own settings, by name.
    """

    device: str | type[Device] = DEVICE
    device_settings: Mapping[str, Any] | None = None


class DeviceKeywords(TypedDict, total=False):
    """Keywords of DeviceOptions."""

    device: str | type[Device]
    device_settings: Mapping[str, Any] | None


def part_of(options: object, *parts: type) -> dict[str, Any]:
    """The fields of some parts, with the values that the options give them."""
    return {field.name: getattr(options, field.name) for part in parts for field in _fields(part)}


def options_from(kind: type[Options], function: str, given: Mapping[str, Any], **more: Any) -> Options:
    """Options from a function's keywords.

    Args:
        more: options that are named parameters of the function.

    Raises:
        TypeError: a keyword is not an option; the message lists those that are.
    """
    names = [field.name for field in _fields(kind) if field.name not in more]
    for name in given:
        if name not in names:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}: it takes {', '.join(names)}"
            )
    return kind(**given, **more)


def takes(kind: type) -> Callable[[Function], Function]:
    """Decorate a function so that its signature and its `Args:` have the options that it takes as keywords."""

    def document(function: Function) -> Function:
        own = inspect.signature(function)
        listed = [field for field in _fields(kind) if field.name not in own.parameters]
        parameters = [each for each in own.parameters.values() if each.kind is not each.VAR_KEYWORD]
        parameters += [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=own.empty if field.default is MISSING else field.default,
                annotation=field.type,
            )
            for field in listed
        ]
        function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # of a function
        if function.__doc__ is not None:  # python -OO drops docstrings, those of the options too
            function.__doc__ = _with_meanings(inspect.getdoc(function) or "", own.parameters, kind)
        return function

    return document


def _with_meanings(text: str, own: Iterable[str], kind: type) -> str:
    """A docstring whose arguments end with those options that it does not explain itself."""
    head, _, rest = text.partition("\n\nArgs:\n")
    explained, _, tail = rest.partition("\n\n")
    names = [field.name for field in _fields(kind) if f"    {field.name}: " not in explained]
    names.sort(key=lambda name: name not in own)
    meanings = _meanings(kind)
    lines = [
        fill(f"{name}: {meanings[name]}", WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name in names
    ]
    return "\n\n".join(filter(None, [head, "\n".join(["Args:", explained, *lines]), tail]))


def _fields(kind: type) -> tuple[Field[Any], ...]:
    return fields(kind)


def _meanings(kind: type) -> dict[str, str]:
    """The meaning of each field, from the docstrings of the classes that declare it."""
    meanings: dict[str, str] = {}
    for part in reversed(kind.__mro__):
        _, _, attributes = (inspect.getdoc(part) or "").partition("Attributes:\n")
        for name, text in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE):
            meanings[name] = " ".join(text.split())
    return meanings

"""Decorators that let functions take the fields of a class of options as keywords, which `help` then lists."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import MISSING
from functools import wraps
from textwrap import TextWrapper
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from moesched.options import Described, described, without_description

WIDTH = 120
"""Width in characters to which docstrings are wrapped."""

Keywords = ParamSpec("Keywords")
Given = TypeVar("Given")
Owner = TypeVar("Owner")
Result = TypeVar("Result")


def documented(kind: type[Given]) -> type[Given]:
    """Decorate a class of options: its signature and the `Args:` of its docstring list each option."""
    own = described(kind)  # type: ignore[arg-type]  # a type variable has no two bounds
    kind.__signature__ = _signature(own.values())  # type: ignore[attr-defined]  # of a class
    if kind.__doc__ is not None:  # python -OO drops docstrings
        kind.__doc__ = _with_meanings(inspect.getdoc(kind) or "", own.values())
    return kind


class takes(Generic[Keywords, Given]):
    """Decorates a function whose one parameter is a class of options: callers give the fields of the class as keywords.

    The function's signature and the `Args:` section of its docstring list these keywords.
    """

    def __init__(self, kind: Callable[Keywords, Given]) -> None:
        self._kind: Any = kind

    @overload
    def __call__(self, function: Callable[[Given], Result]) -> Callable[Keywords, Result]: ...

    @overload
    def __call__(
        self, function: Callable[[Owner, Given], Result]
    ) -> Callable[Concatenate[Owner, Keywords], Result]: ...

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        *owner, _ = inspect.signature(function).parameters.values()
        own = described(self._kind).values()
        signature = _signature(own)
        title = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def called(*given: Any, **keywords: Any) -> Any:
            try:
                bound = signature.bind(*given[len(owner) :], **keywords)
            except TypeError as error:
                raise TypeError(
                    f"{title}() {error}: it takes {', '.join(each.name for each in own)}"
                ) from None
            return function(*given[: len(owner)], self._kind(**bound.arguments))

        shown = inspect.signature(function).replace(parameters=[*owner, *signature.parameters.values()])
        called.__signature__ = shown  # type: ignore[attr-defined]  # of a function
        if function.__doc__ is not None:  # python -OO drops docstrings
            called.__doc__ = _with_meanings(inspect.getdoc(function) or "", own)
        return called


def _place(each: Described) -> int:
    """Return the sort key of a parameter: 0 for positional ones, 1 for those without a default, 2 for the others."""
    return 0 if each.by_place else 1 if each.default is MISSING else 2


def _signature(own: Iterable[Described]) -> inspect.Signature:
    return inspect.Signature(list(map(_parameter, sorted(own, key=_place))))


def _parameter(each: Described) -> inspect.Parameter:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if each.by_place else inspect.Parameter.KEYWORD_ONLY
    default = inspect.Parameter.empty if each.default is MISSING else each.default
    return inspect.Parameter(each.name, kind, default=default, annotation=without_description(each.source))


def _with_meanings(text: str, own: Iterable[Described]) -> str:
    """Return a docstring with an `Args:` section of these options, inserted before its `Raises:`."""
    head, raises, errors = text.partition("\n\nRaises")
    indented = TextWrapper(WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
    lines = [
        indented.fill(f"{each.name}: {each.option.python or each.option.help}")
        for each in sorted(own, key=_place)
    ]
    return "\n".join([head, "", "Args:", *lines]) + raises + errors

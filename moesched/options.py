"""Options: dataclasses whose annotated fields are keywords in Python, flags on the command line and axes of sweeps.

An option is written in one place, as a field: parser, `help`, reference and sweeps read its type, default and `Option`.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from reprlib import repr as shown
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, dataclass_transform, get_args, get_origin

from moesched.errors import BadInput

Number = int | float


@dataclass(frozen=True)
class Option:
    """The description of an option, in the annotation of its field.

    Attributes:
        help: the option's meaning, for `--help`, `help` and the reference.
        metavar: placeholder of the value in `--help`; None for a name that the parser makes.
        flag: the name on the command line; None for the field's name with dashes. A name `--no-...` switches the
            field off; a name without dashes is a positional argument; "" is for an option that only Python has.
        group: heading of the option in `--help`; None for the general heading.
        python: the meaning that Python's `help` shows; None if it is the same as in `help`.
        ge, gt, le: bounds of a number: at least, more than, at most; None for no bound.
        writes: the kind of file that the option's value names, which the command writes, such as "trace"; None for no
            file.
        numbered: whether later batches write further files, with a number in their names.
        many: whether several values may follow one flag.
    """

    help: str
    metavar: str | None = None
    flag: str | None = None
    group: str | None = None
    python: str | None = None
    ge: Number | None = None
    gt: Number | None = None
    le: Number | None = None
    writes: str | None = None
    numbered: bool = False
    many: bool = False

    @property
    def is_bounded(self) -> bool:
        """Test whether the option's value is a number for which there are bounds."""
        return self.ge is not None or self.gt is not None

    @property
    def bounds(self) -> str:
        """The option's bounds in words; empty without bounds."""
        if not self.is_bounded:
            return ""
        if self.gt is not None:
            return f"more than {self.gt:,}" + ("" if self.le is None else f", at most {self.le:,}")
        return f"{self.ge:,} or more" if self.le is None else f"{self.ge:,} to {self.le:,}"

    def admits(self, number: Number) -> bool:
        """Test whether a number is within the bounds, and finite."""
        finite = not isinstance(number, float) or math.isfinite(number)
        high_enough = (self.ge is None or number >= self.ge) and (self.gt is None or number > self.gt)
        return finite and high_enough and (self.le is None or number <= self.le)


class Described(NamedTuple):
    """A field of a class of options, with its description.

    Attributes:
        name: the field's name.
        kind: the field's type; the type's name as text if the module imports it for type checkers only.
        option: the field's description.
        source: the field's annotation as it is written in the source.
        default: the field's default; MISSING for an option that has to be given.
        by_place: whether Python also takes the option as a positional argument.
    """

    name: str
    kind: Any
    option: Option
    source: str = ""
    default: Any = MISSING
    by_place: bool = False

    @property
    def flag(self) -> str:
        """The option's name on the command line."""
        flag = self.option.flag
        return f"--{self.name.replace('_', '-')}" if flag is None else flag

    @property
    def switches_off(self) -> bool:
        """Test whether giving the flag switches the option off, such as the flag `--no-band` of the option `band`."""
        return self.flag.startswith("--no-") and not self.name.startswith("no_")

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types that the option's value may have, apart from None."""
        return _kinds_of(self.kind)

    @property
    def is_table(self) -> bool:
        """Test whether the option's value is a mapping of names to values."""
        return any(get_origin(each) is Mapping for each in self.kinds)

    @property
    def item_kind(self) -> Any:
        """The type to which the option's text is converted; for a mapping, the type of each value."""
        if self.is_table:
            return get_args(self.kinds[0])[1]
        return str if str in self.kinds else self.kinds[0]

    def plain(self, value: Any) -> Any:
        """Return a value in Python's own type: a numpy number as an int or a float, other values unchanged.

        A path becomes text if the option takes no path.
        """
        if isinstance(value, PathLike) and Path not in self.kinds:
            return fspath(value)
        if self.kinds == (int,) and not isinstance(value, bool) and isinstance(value, Integral):
            return int(value)  # numpy's have limits, and are kept by caches
        if self.kinds == (float,) and not isinstance(value, int | float) and isinstance(value, Real):
            return float(value)
        return value

    def require(self, value: Any, title: str = "") -> None:
        """Raise BadInput if a value is of a wrong type or out of bounds.

        Args:
            title: the value's name in the message; empty for the option's own name.
        """
        is_number = self.kinds in ((int,), (float,))
        if not self._admits_type(value):
            omits = value is None and self.default is not MISSING
            remedy = (
                f"omit it for {shown(self.default)}" if omits else f"give {without_description(self.source)}"
            )
            raise BadInput(f"{title or self.name} is {shown(value)}: {remedy}")
        if value is None or not (is_number or self.option.is_bounded):
            return
        needed, words = (Integral, "whole number") if self.kinds == (int,) else (Real, "number")
        for number in [value] if is_number or not isinstance(value, tuple | list) else value:
            if isinstance(number, bool) or not issubclass(type(number), needed):
                said = f"{shown(number)}, no {words}"
            elif self.option.is_bounded and not self.option.admits(number):
                said = f"{number:,}"
            else:
                continue
            name = title or self.flag or self.name
            raise BadInput(f"{name} is {said}: give {self.option.bounds or 'one'}")

    def _admits_type(self, value: Any) -> bool:
        """Test whether a value is of the option's type; types imported for type checkers only are not checked."""
        if value is None:
            return self.default is None or self.kind is Any or NoneType in get_args(self.kind)
        if Path in self.kinds and {*self.kinds} <= {Path, str}:
            return isinstance(value, str | PathLike)
        if self.kinds == (bool,):
            return value in (True, False)
        if any(get_origin(each) is Callable for each in self.kinds):
            return callable(value)
        written = without_description(self.source or "Any")  # where a name for type checkers is no `str`
        if written == "Sequence[str]":
            return isinstance(value, Sequence) and not isinstance(value, str | bytes)
        if written in ("str", "str | None"):
            return isinstance(value, str)
        given = tuple(each for each in self.kinds if isinstance(each, type) and issubclass(each, Options))
        return not given or isinstance(value, given)


@cache
def _kinds_of(kind: Any) -> tuple[Any, ...]:
    several = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return tuple(each for each in several if each is not NoneType)


@dataclass(frozen=True, kw_only=True)
@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
class Options:
    """Base of frozen dataclasses whose fields are options; each field's annotation has an `Option`.

    A subclass may give an inherited option another type or default; the description stays.

    Raises:
        BadInput: a value is of a wrong type, a number is out of bounds, or a path is empty.
    """

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for each in described(type(self)).values():
            value = each.plain(getattr(self, each.name))
            object.__setattr__(self, each.name, value)
            each.require(value)
            if isinstance(value, str) and not value and Path in each.kinds:
                raise BadInput(f"{each.name} is '', which is no path: name a file or a folder")
            if each.is_table and value is not None and not isinstance(value, Mapping):
                raise BadInput(f"{each.name} is {value!r}: give a mapping of names to values, such as a dict")


_DESCRIBED: dict[type, dict[str, Described]] = {}


def described(kind: type[Options]) -> dict[str, Described]:
    """Return the fields of a class of options that have an `Option` in their annotation, by name."""
    if kind not in _DESCRIBED:
        _DESCRIBED[kind] = _described(kind)
    return _DESCRIBED[kind]


def _described(kind: type[Options]) -> dict[str, Described]:
    found: dict[str, tuple[Any, Option, str]] = {}
    for part in reversed(kind.__mro__):
        names = _Names(vars(sys.modules[part.__module__]))
        for name, text in inspect.get_annotations(part).items():
            annotation, option = split(eval(text, {}, names) if isinstance(text, str) else text)
            if option is None and name in found:
                option = found[name][1]
            if option is not None:
                source = text if isinstance(text, str) else inspect.formatannotation(annotation)
                found[name] = annotation, option, source
    return {
        each.name: Described(each.name, *found[each.name], each.default, not each.kw_only)
        for each in fields(kind)
        if each.name in found
    }


def split(annotation: Any) -> tuple[Any, Option | None]:
    """Split an annotation into its type and its `Option`, if it has one."""
    if get_origin(annotation) is not Annotated:
        return annotation, None
    kind, *marks = get_args(annotation)
    return kind, next((mark for mark in marks if isinstance(mark, Option)), None)


@cache
def without_description(annotation: str) -> str:
    """Return the type in an annotation's source text: of "Annotated[int, Option(...)]" it is "int"."""
    match ast.parse(annotation, mode="eval").body:
        case ast.Subscript(ast.Name("Annotated"), ast.Tuple([kind, *_])):
            return ast.unparse(kind)
    return annotation


def part_of(options: Options, *parts: type[Options]) -> dict[str, Any]:
    """Return the values of `options` for the fields of the option classes `parts`, by field name."""
    return {name: getattr(options, name) for part in parts for name in described(part)}


def flags_given(options: Options) -> list[str]:
    """Return the flags, without values, of the options whose values differ from the command line's defaults."""
    return [
        each.flag
        for each in described(type(options)).values()
        if each.flag and getattr(options, each.name) != (True if each.switches_off else each.default)
    ]


class _Names(dict[str, Any]):
    """Namespace to evaluate a module's annotations in; names that are imported for type checkers only are `str`."""

    def __missing__(self, name: str) -> Any:
        return vars(builtins).get(name, str)

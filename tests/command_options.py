"""The options of every command, as the command line takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from cyclopts import Parameter

from moesched.cli.files import Writes
from moesched.cli.main import make_app
from moesched.cli.options import OUTPUT


class Option(NamedTuple):
    """An option, or an argument without a name, whose `flag` is then empty."""

    flag: str
    required: bool
    names: bool
    writes: bool
    output: bool

    def given(self, value: str) -> list[str]:
        """The option with a value."""
        return [f"{self.flag}={value}"] if self.flag else [value]


app = cache(make_app)


def commands() -> list[str]:
    """The names of all commands."""
    return [name for name in app() if not name.startswith("-")]


@cache
def options_of(name: str) -> list[Option]:
    """The options of a command, in their order."""
    command = app()[name].default_command
    assert command is not None
    hints = get_type_hints(command, include_extras=True)
    found: list[Option] = []
    for parameter in inspect.signature(command).parameters.values():
        struct = next((each for each in _kinds(hints[parameter.name]) if is_dataclass(each)), None)
        if struct is not None:
            found += _fields(struct)
        else:
            positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL)
            required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
            found.append(_option(parameter.name, hints[parameter.name], required, positional))
    return found


def call(name: str, *given: tuple[Option, str]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A command and its arguments: these options, and some word for others that it needs."""
    values = dict(given)
    line = [name]
    for option in options_of(name):
        if option in values or option.required:
            line += option.given(values.get(option, "word"))
    command, bound, _ = app().parse_args(line, exit_on_error=False, print_error=False)
    return command, dict(bound.arguments)


def _fields(struct: Any) -> Iterator[Option]:
    hints = get_type_hints(struct, include_extras=True)
    for field in fields(struct):
        required = field.default is MISSING and field.default_factory is MISSING
        yield _option(field.name, hints[field.name], required, False)


def _option(name: str, hint: Any, required: bool, positional: bool) -> Option:
    metadata = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    parameters = [each for each in metadata if isinstance(each, Parameter)]
    flags = [each for parameter in parameters for each in parameter.name or () if each.startswith("--")]
    groups = [
        group for parameter in parameters if isinstance(parameter.group, tuple) for group in parameter.group
    ]
    return Option(
        flag="" if positional else (flags or ["--" + name.replace("_", "-")])[0],
        required=required,
        names=bool({str, Path} & set(_kinds(hint))),
        writes=any(isinstance(each, Writes) for each in metadata),
        output=OUTPUT in groups,
    )


def _kinds(hint: Any) -> Iterator[Any]:
    """The types in an annotation."""
    if get_origin(hint) is Annotated:
        yield from _kinds(get_args(hint)[0])
    elif get_origin(hint) in (Union, UnionType, tuple):
        for each in get_args(hint):
            yield from _kinds(each)
    else:
        yield hint

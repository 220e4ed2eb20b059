"""The options of every command, as the command line takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

from moesched.cli.main import make_app
from moesched.jobs.options import OUTPUT
from moesched.options import split


class Option(NamedTuple):
    """An option, or an argument without a name, whose `flag` is then empty."""

    flag: str
    required: bool
    names: bool
    path: bool
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
    return list(map(_option, inspect.signature(command).parameters.values()))


def call(name: str, *given: tuple[Option, str]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A command and its arguments: these options, and 1 for others that it needs."""
    values = dict(given)
    line = [name]
    for option in options_of(name):
        if option in values or option.required:
            line += option.given(values.get(option, "1"))
    command, bound, _ = app().parse_args(line, exit_on_error=False, print_error=False)
    return command, dict(bound.arguments)


def _option(parameter: inspect.Parameter) -> Option:
    kind, described = split(parameter.annotation)
    assert described is not None
    by_place = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL)
    required = parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL
    kinds = {split(each)[0] for each in (kind, *get_args(kind))}
    flag = described.flag or "--" + parameter.name.replace("_", "-")
    return Option(
        flag="" if by_place else flag,
        required=required,
        names=bool({str, Path} & kinds),
        path=Path in kinds,
        writes=described.writes is not None,
        output=described.group == OUTPUT,
    )

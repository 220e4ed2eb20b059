"""Makes commands of the command line from Python functions: each parameter with an `Option` becomes a flag."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, replace
from functools import partial, wraps
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from cyclopts import App, CoercionError, Group, Parameter, Token

from moesched.errors import BadInput
from moesched.jobs.options import LAST_HEADINGS
from moesched.options import Described, Options, described, split
from moesched.system.plain_text import plain_text

Make = Callable[[Mapping[str, Any]], Any]
"""Function that takes the values of flags, by name, and returns the value of one parameter of a command."""

Function = TypeVar("Function", bound=Callable[..., Any])

MOST_DIGITS = 20
"""The most digits of a whole number on the command line."""

_COMMANDS: dict[Callable[..., Any], Command] = {}


class Several(NamedTuple):
    """Annotation of a parameter that takes several values for each option of the class `options`, as in sweeps.

    The parameter's value is a mapping from the option's name to the texts that the user gave.
    """

    options: type[Options]


class Command(NamedTuple):
    """A command's name, and the examples below its help."""

    name: str
    examples: str


def command(examples: str, name: str = "") -> Callable[[Function], Function]:
    """Return a decorator that declares a function to be a command; the function's docstring is the command's help.

    Each parameter of the function is annotated with an `Option`, or is of a class of options. The function returns the
    exit code, or None for 0.

    Args:
        examples: text below the command's help.
        name: the command's name; by default the function's, with dashes.
    """

    def declare(function: Function) -> Function:
        _COMMANDS[function] = Command(name or function.__name__.replace("_", "-"), examples)
        return function

    return declare


def add_commands(app: App, commands: Mapping[str, Sequence[Callable[..., Any]]], called: str | None) -> None:
    """Add commands to a cyclopts app.

    Args:
        commands: functions that were declared with `command`, by their heading in `moesched --help`.
        called: name of the only command to add, which saves time. With None or an unknown name, all are added.
    """
    by_heading = [(heading, each) for heading, functions in commands.items() for each in functions]
    wanted = [(heading, each) for heading, each in by_heading if called == _COMMANDS[each].name] or by_heading
    groups = {heading: Group(heading, sort_key=place) for place, heading in enumerate(commands)}
    for place, (heading, function) in enumerate(wanted):
        name, examples = _COMMANDS[function]
        help = "\n\n".join(" ".join(each.split()) for each in (inspect.getdoc(function) or "").split("\n\n"))
        needed = called in (name, None)
        app.command(
            flat(function) if needed else function,
            name=name,
            help=help,
            help_epilogue=examples,
            group=groups[heading],
            sort_key=place,
            usage=_usage(name, function) if needed else None,
        )


def _usage(name: str, function: Callable[..., Any]) -> str:
    """Return the usage line of a command's help; the one that cyclopts makes would leave out optional arguments."""
    flags, _ = _all_taken(function)
    named = [each for each in flags if each.flag.startswith("--")]
    needed = [f"{each.flag} {each.option.metavar}" for each in named if each.default is MISSING]
    options = ["[OPTIONS]"] if len(needed) < len(named) else []
    by_place = [_argument(each) for each in flags if each not in named]
    return " ".join(["Usage: moesched", name, *needed, *options, *by_place])


def _argument(each: Described) -> str:
    """Return a positional argument in the form in which the usage line shows it, such as "[B...]"."""
    if get_origin(each.kind) is tuple:
        return f"[{each.flag}...]"
    return each.flag if each.default is MISSING else f"[{each.flag}]"


def commands_with(commands: Mapping[str, Sequence[Callable[..., Any]]], flag: str) -> list[str]:
    """Return the names of the commands that have a flag.

    Args:
        commands: functions by heading, in the form that `add_commands` takes.
    """
    functions = (function for group in commands.values() for function in group)
    return [
        _COMMANDS[function].name
        for function in functions
        if any(each.flag == flag for each in _all_taken(function)[0])
    ]


def flat(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a command's function in a function that has one parameter for each flag, as cyclopts needs."""
    flags, makers = _all_taken(function)
    headings = sorted(dict.fromkeys(each.option.group for each in flags), key=_place_of_heading)
    groups = {
        heading: Group(heading, sort_key=place) for place, heading in enumerate(headings, start=1) if heading
    }
    parameters = [_parameter(each, groups.get(each.option.group or "")) for each in flags]
    signature = inspect.Signature(
        sorted(parameters, key=lambda each: (each.kind, each.default is not each.empty))
    )

    @wraps(function)
    def called(*by_place: Any, **by_name: Any) -> Any:
        given = signature.bind(*by_place, **by_name)
        given.apply_defaults()
        return function(**{name: make(given.arguments) for name, make in makers.items()})

    called.__signature__ = signature  # type: ignore[attr-defined]  # of a function
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def _place_of_heading(heading: str | None) -> int:
    """Return the sort key of a heading of options in a help: its place in `LAST_HEADINGS`, from 1; 0 for others."""
    return LAST_HEADINGS.index(heading) + 1 if heading in LAST_HEADINGS else 0


def _taken(name: str, hint: Any, default: Any) -> tuple[list[Described], Make]:
    """Return the flags for a parameter of a command, and the function that makes its value from the flags' values.

    Args:
        name: name of the parameter.
        hint: annotation of the parameter.
        default: default of the parameter; `inspect.Parameter.empty` for none.
    """
    kind, option = split(hint)
    if option is not None:
        own = Described(
            name, kind, option, default=MISSING if default is inspect.Parameter.empty else default
        )
        return [own], partial(_value, own)
    several = next((mark for mark in get_args(hint) if isinstance(mark, Several)), None)
    if several is not None:
        axes = [_several(each) for each in _on_command_line(several.options)]
        return axes, partial(_given, axes)
    return [flag for each in _on_command_line(kind) for flag in _flags(each)], partial(_options, kind)


def _all_taken(function: Callable[..., Any]) -> tuple[list[Described], dict[str, Make]]:
    """Return the flags of a command, and a function for each parameter that makes its value from the flags' values."""
    hints = get_type_hints(function, include_extras=True)
    flags: list[Described] = []
    makers: dict[str, Make] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        own, makers[name] = _taken(name, hints[name], parameter.default)
        flags += own
    return flags, makers


def _on_command_line(kind: type[Options]) -> list[Described]:
    return [each for each in described(kind).values() if each.flag]


def _flags(each: Described) -> list[Described]:
    """Return the flag of an option; if the option's value is a class of options, the flags of all of that class."""
    nested = _nested(each)
    return [each] if nested is None else [flag for own in _on_command_line(nested) for flag in _flags(own)]


def _nested(each: Described) -> type[Options] | None:
    [kind, *_] = each.kinds
    return kind if isinstance(kind, type) and issubclass(kind, Options) else None


def _several(each: Described) -> Described:
    """Return a copy of an option, with a flag that takes several values, separated by commas."""
    sentence, _, _ = each.option.help.partition(". ")
    option = replace(
        each.option,
        help=f"{sentence.rstrip('.')}.",
        metavar=f"{each.option.metavar or 'VALUE'},...",
        flag=each.flag,
        group="Axes",
    )
    return Described(each.name, tuple[str, ...], option, default=())


def _given(axes: Sequence[Described], values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {each.name: values[each.name] for each in axes if values[each.name]}


def _options(kind: type[Options], values: Mapping[str, Any]) -> Options:
    made = {}
    for each in _on_command_line(kind):
        nested = _nested(each)
        made[each.name] = _value(each, values) if nested is None else _options(nested, values)
    return kind(**made)


def _value(each: Described, values: Mapping[str, Any]) -> Any:
    """Return the value of the option `each`, from the values of all flags by name.

    Raises:
        BadInput: the value is out of the option's bounds, or lacks the NAME=VALUE pairs that the option takes.
    """
    value = values[each.name]
    if each.switches_off:
        return not value
    if each.is_table:
        return read_table(each, value) if value else each.default
    each.require(value)
    return value


def read_table(each: Described, texts: Sequence[str]) -> dict[str, Any]:
    """Parse arguments such as "ahead=3" into a table of values by key.

    Args:
        each: the option. If it takes values of any type, "3" becomes the number 3; otherwise values stay texts.

    Raises:
        BadInput: a text has no key, or a key comes twice.
    """
    from moesched.settings import typed_value

    table: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise BadInput(f"{each.flag} {text!r}: write {each.option.metavar}")
        if key in table:
            raise BadInput(f"{each.flag} gives {key} twice, {table[key]!r} and {value!r}: give it once")
        table[key] = typed_value(value) if each.item_kind is Any else value
    return table


def _parameter(each: Described, group: Group | None) -> inspect.Parameter:
    """Return the parameter for an option's flag, in a function that cyclopts calls.

    The parameter's annotation tells cyclopts the flag's name, type and help.

    Args:
        group: heading of the flag in the help; None for the general one.
    """
    option, kind, default = each.option, _kind(each), each.default
    if get_origin(kind) is tuple:
        default = ()
    elif each.switches_off:
        default = False
    grouped: dict[str, Any] = {} if group is None else {"group": group}
    marks = Parameter(
        name=each.flag,
        metavar=option.metavar,
        help=option.help,
        negative="",
        show_default=False if default is False or default in ("", ()) else None,
        consume_multiple=option.many or None,
        **grouped,
    )
    place = _place(each.flag, kind)
    if place is inspect.Parameter.VAR_POSITIONAL:
        return inspect.Parameter(each.name, place, annotation=Annotated[get_args(kind)[0], marks, option])
    return inspect.Parameter(
        each.name,
        place,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[kind if default is not None else kind | None, marks, option],
    )


def _kind(each: Described) -> Any:
    """Return the type by which cyclopts parses an option's value."""
    if each.is_table:
        return tuple[str, ...]
    [first, *_] = each.kinds
    if get_origin(first) in (tuple, Sequence):
        [item, *_] = get_args(first)
        return GenericAlias(tuple, (_CHECKED.get(item, item), ...))
    kind = next((each_kind for each_kind in (Path, str) if each_kind in each.kinds), first)
    return _CHECKED.get(kind, kind)


def _place(flag: str, kind: Any) -> Any:
    if flag.startswith("--"):
        return inspect.Parameter.KEYWORD_ONLY
    return (
        inspect.Parameter.VAR_POSITIONAL if get_origin(kind) is tuple else inspect.Parameter.POSITIONAL_ONLY
    )


def _whole_number(_: object, tokens: Sequence[Token]) -> int:
    """Convert an argument to an int; a fraction such as 1.5 is refused, not rounded."""
    [token, *_] = tokens
    if re.fullmatch(r"[+-]?[0-9]+", token.value) is None:
        raise CoercionError(msg=f"{plain_text(token.value)!r} is not a whole number.", token=token)
    if (digits := len(token.value.lstrip("+-"))) > MOST_DIGITS:
        raise CoercionError(msg=f"the number has {digits:,} digits, and may have {MOST_DIGITS}.", token=token)
    return int(token.value)


def _named_path(_: object, tokens: Sequence[Token]) -> Path:
    """Convert an argument to a path; an empty one is refused, as Python would take it for the current folder."""
    [token, *_] = tokens
    if not token.value:
        raise CoercionError(msg="'' is no path: name a file or a folder.", token=token)
    return Path(token.value)


_CHECKED = {
    int: Annotated[int, Parameter(converter=_whole_number)],
    Path: Annotated[Path, Parameter(converter=_named_path)],
}
"""Types whose annotation has cyclopts check values as it converts them, by the plain type."""

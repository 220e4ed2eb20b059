"""Parses and checks settings of a policy or device, which are parameters of the constructor."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, get_args, get_type_hints

from moesched.errors import BadInput

_MEANT = {bool: "true or false", int: "a whole number", float: "a number"}


def parse_value(text: str) -> int | float | bool | str:
    """Convert a text to an int, float or bool if it reads as one; otherwise return it as it is."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def typed_value(text: str) -> int | float | bool | str:
    """Convert a text as `parse_value` does, unless its spelling would be lost, such as that of "1e3" or "007".

    `check_settings` later converts such a text, unless the setting's type is `str`.
    """
    value = parse_value(text)
    return value if str(value) == text else text


def check_settings(plugin: type, title: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check settings against the types of a plug-in's parameters; return the settings as keyword arguments.

    Only parameters with a default are settings. Those annotated with other types than bool, int, float and str are not
    checked. Texts that read as numbers or truth values are converted, unless the setting may be a text.

    Args:
        plugin: the class of the policy or device.
        title: name of the plug-in in errors, such as "policy cgopipe".
        settings: the value of each setting, by name.

    Raises:
        BadInput: the plug-in has no such setting, or the value is of another type.
    """
    parameters = inspect.signature(plugin).parameters.values()
    known = setting_names(plugin)
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    hints = _hints(plugin)
    checked = {key: _converted(value, hints.get(key)) for key, value in settings.items()}
    for key, value in checked.items():
        if key not in known and not takes_any:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise BadInput(f"{title} has no setting {key!r}: {takes}")
        if not _is(value, hints.get(key)):
            raise BadInput(f"{title}: {key} is {value!r}: give {_MEANT[hints[key]]}")
    return checked


def require_defaults(policy: type, title: str) -> None:
    """Check that each argument of a policy's constructor has a default, since a user's settings may name only some.

    title: the policy's name in errors.

    Raises:
        BadInput: a parameter of its constructor has no default.
    """
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(policy).parameters.values()
    missing = [
        each.name
        for each in parameters
        if each.default is inspect.Parameter.empty and each.kind not in variable
    ]
    if missing:
        raise BadInput(
            f"{title}: its constructor has no default for {', '.join(missing)}: give one; --set NAME=VALUE replaces it"
        )


def takes_setting(plugin: type, name: str) -> bool:
    """Test whether a plug-in's constructor has a parameter `name` with a default, which makes it a setting."""
    return name in setting_names(plugin)


def setting_names(plugin: type) -> list[str]:
    """Return the names of a plug-in's settings: its constructor's parameters with a default."""
    parameters = inspect.signature(plugin).parameters.values()
    return [each.name for each in parameters if each.default is not inspect.Parameter.empty]


def _hints(plugin: type) -> dict[str, Any]:
    try:
        return get_type_hints(plugin.__init__)  # type: ignore[misc]  # the class itself is asked, not an instance
    except (NameError, TypeError):
        return {}  # names that exist for type checkers only


def _converted(value: Any, hint: Any) -> Any:
    if hint is str:
        return str(value)
    if isinstance(value, str) and str not in get_args(hint):
        return parse_value(value)
    if not isinstance(value, bool) and isinstance(value, Integral):
        return int(value)  # of numpy, perhaps
    if not isinstance(value, int | float) and isinstance(value, Real):
        return float(value)
    return value


def _is(value: Any, hint: Any) -> bool:
    if hint is bool:
        return isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return True

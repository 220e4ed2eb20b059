"""An extension of Griffe: options and functions that take them show each keyword in the site, as `help` does."""

from __future__ import annotations

import inspect
from typing import Any

from griffe import Class, Extension, Function, Parameter, ParameterKind, Parameters, dynamic_import

KINDS = {kind.name: kind for kind in ParameterKind}


class Keywords(Extension):  # type: ignore[misc]  # Griffe is installed for the site alone
    """Takes what the decorators `takes` and `documented` change from the objects, not from their source."""

    def on_class(self, *, cls: Class, **_: Any) -> None:
        """Replace what was read from the source by a constructor and a docstring with all options."""
        if any(str(decorator.value) == "documented" for decorator in cls.decorators) and cls.docstring:
            kind = dynamic_import(cls.path)
            cls.docstring.value = inspect.getdoc(kind) or ""
            cls.members.clear()
            own = Parameter("self", kind=ParameterKind.positional_or_keyword)
            cls.set_member("__init__", Function("__init__", parameters=_parameters(kind, own)))

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Replace what was read from the source."""
        if not any(str(decorator.value).startswith("takes(") for decorator in func.decorators):
            return
        function = dynamic_import(func.path)
        func.parameters = _parameters(function)
        if func.docstring is not None:
            func.docstring.value = inspect.getdoc(function) or ""


def _parameters(described: Any, *before: Parameter) -> Parameters:
    return Parameters(*before, *map(_parameter, inspect.signature(described).parameters.values()))


def _parameter(given: inspect.Parameter) -> Parameter:
    return Parameter(
        given.name,
        annotation=None if given.annotation is given.empty else str(given.annotation),
        kind=KINDS[given.kind.name.lower()],
        default=None if given.default is given.empty else repr(given.default),
    )

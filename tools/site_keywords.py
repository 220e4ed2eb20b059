"""An extension of Griffe: functions that take options show each keyword in the site, as `help` does."""

from __future__ import annotations

import inspect
from typing import Any

from griffe import Extension, Function, Parameter, ParameterKind, Parameters, dynamic_import

KINDS = {kind.name: kind for kind in ParameterKind}


class Keywords(Extension):  # type: ignore[misc]  # Griffe is installed for the site alone
    """Takes signature and docstring of a function with the decorator `takes` from the function, not from its source."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Replace what was read from the source."""
        if not any(str(decorator.value).startswith("takes(") for decorator in func.decorators):
            return
        function = dynamic_import(func.path)
        parameters = inspect.signature(function).parameters.values()
        func.parameters = Parameters(*map(_parameter, parameters))
        if func.docstring is not None:
            func.docstring.value = inspect.getdoc(function) or ""


def _parameter(given: inspect.Parameter) -> Parameter:
    return Parameter(
        given.name,
        annotation=None if given.annotation is given.empty else str(given.annotation),
        kind=KINDS[given.kind.name.lower()],
        default=None if given.default is given.empty else repr(given.default),
    )

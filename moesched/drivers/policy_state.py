"""Copies a policy's state, so that a later copy can be compared to see whether a step changed the policy."""

from __future__ import annotations

import io
import pickle
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from moesched.seams import Policy

NOT_STATE = ("moesched.machines.", "moesched.models.", "moesched.steps.")
"""Modules whose objects are compared by identity only, since a run changes them; captured steps show those changes."""


def state_of(policy: Policy) -> object:
    """Return the attributes of a policy and of its classes, and everything that they refer to, in comparable form.

    Two results for one policy are equal if nothing has changed in between. Objects that cannot be compared, such as
    generators, count as changed.
    """
    own = [
        {name: value for name, value in vars(cls).items() if not name.startswith("__")}
        for cls in type(policy).__mro__
    ]
    found = io.BytesIO()
    try:
        _Comparable(found, pickle.HIGHEST_PROTOCOL).dump((policy, own))
    except Exception:  # whatever an object raises that cannot be pickled
        return object()
    return found.getvalue()


class _Comparable(pickle.Pickler):
    """Pickles a policy's attributes that can change; classes, functions and objects of the run are replaced by ids."""

    def persistent_id(self, obj: Any) -> int | None:
        kind = type(obj)
        if isinstance(
            obj, (type, ModuleType, FunctionType, BuiltinFunctionType, property, classmethod, staticmethod)
        ):
            return id(obj)
        return id(obj) if kind.__module__.startswith(NOT_STATE) else None

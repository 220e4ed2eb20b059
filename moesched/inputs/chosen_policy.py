"""Finds the policy of a job, which users give by name, as a class, or as an object."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

from moesched import plugins
from moesched.errors import BadInput
from moesched.seams import Policy
from moesched.settings import check_settings, require_defaults

PolicyGiven = str | type[Policy] | Policy
"""A policy as users give it: a name of `moesched list policies`, module:Class, file.py:Class, a class, or an object."""


class ChosenPolicy(NamedTuple):
    """A policy that a user chose; `make` gives a new object for each plan.

    Attributes:
        name: name of the policy in reports.
        cls: the policy's class.
        make: returns a new object: an instance of the class with its settings, or a copy of the object that was given.
        is_class: whether the user gave a name or a class, so that `make` takes settings as keywords.
    """

    name: str
    cls: type[Policy]
    make: partial[Policy]
    is_class: bool


def choose_policy(given: PolicyGiven, settings: Mapping[str, Any] | None = None) -> ChosenPolicy:
    """Find a policy by its name, class or object, and check that its class takes the settings.

    Args:
        settings: values by name for the policy's class; None or empty for its defaults.

    Raises:
        BadInput: there is no policy of that name, the object is no policy, or it does not take the settings.
    """
    name = plugins.name_of("policies", given)
    if isinstance(given, str | type):
        cls = plugins.find("policies", given)
        require_defaults(cls, f"policy {name}")
        make = partial(cls, **check_settings(cls, f"policy {name}", settings or {}))
        return ChosenPolicy(name, cls, make, is_class=True)
    cls = plugins.find("policies", type(given))
    if settings:
        raise BadInput(
            f"settings are given, and policy {name} is an object: give its class, or omit the settings"
        )
    return ChosenPolicy(name, cls, partial(_copy, given), is_class=False)


def _copy(policy: Policy) -> Policy:
    try:
        return deepcopy(policy)
    except Exception as error:
        name, why = plugins.name_of("policies", policy), f"{type(error).__name__}: {error}"
        raise BadInput(
            f"policy {name} cannot be copied for a batch ({why}): give a new object, or its class"
        ) from error

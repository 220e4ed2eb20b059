"""Declarations of a policy that a plan keeps together, until their memory is reserved."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from moesched.errors import PolicyError
from moesched.steps.read_only import ReadOnly
from moesched.steps.reservations import Declared, NodeShare
from moesched.tasks import Discipline


class Declarations(ReadOnly):
    """Base of `Plan`: everything declared so far besides pools and resident pages."""

    _assignable = frozenset({"discipline"})
    _remedy = "declare with the plan's methods, and keep your own numbers in attributes of the policy"

    def __init__(self, declared: Declared) -> None:
        self._declared = declared

    @property
    def declared(self) -> Declared:
        """The declarations so far."""
        return self._declared

    @property
    def nodes(self) -> NodeShare:
        """This node's part of a model whose experts several nodes share."""
        return self._declared.nodes

    @property
    def discipline(self) -> Discipline:
        """The order in which lanes start tasks; a policy may assign it in `plan`."""
        return self._declared.discipline

    @discipline.setter
    def discipline(self, discipline: Discipline) -> None:
        if discipline not in get_args(Discipline):
            known = " or ".join(map(repr, get_args(Discipline)))
            raise PolicyError(f"discipline is {discipline!r}: assign {known}")
        self._declare("discipline", replace(self._declared, discipline=discipline))

    def _declare(self, verb: str, declared: Declared) -> None:
        if self._declared.settled:
            raise PolicyError(f"{verb}: the plan is made and its memory reserved: declare it in Policy.plan")
        self._declared = declared

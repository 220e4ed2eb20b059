"""Declarations of a policy in its plan, such as pools of slots, before memory is reserved for them."""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral
from typing import get_args

from moesched.errors import PolicyError
from moesched.steps.memory import Replacement
from moesched.steps.node_experts import require_routers
from moesched.steps.read_only import ReadOnly
from moesched.steps.reservations import Declared, NodeShare
from moesched.tasks import Discipline


def require_whole(verb: str, number: object, least: int | None = None) -> int:
    """Return a declared number, which may be numpy's, as an int.

    Args:
        verb: the declaring method's name, for the message.
        least: the smallest number that can be declared; None for any.

    Raises:
        PolicyError: `number` is no whole number, or less than `least`.
    """
    if not isinstance(number, Integral) or (least is not None and number < least):
        limit = "" if least is None else f", {least} or more"
        raise PolicyError(f"{verb}: {number!r} is no whole number{limit}: give one, as by int(...) or //")
    return int(number)


def require_slots(name: str, slots: object, filled: int, replacement: object) -> int:
    """Check a declared pool's number of slots and its replacement rule; return the number of slots as an int.

    Args:
        name: the pool's name, for messages.
        slots: the declared number of slots.
        filled: number of pages that are in the pool before the first step.
        replacement: the declared rule: a name or an object.

    Raises:
        PolicyError: `slots` is no number, or too few for the pages that fill the pool; or there is no such rule.
    """
    if not isinstance(slots, Integral) or slots < 0:
        raise PolicyError(f"pool: {name} has {slots!r} slots: give a whole number, as by int(...) or //")
    slots = int(slots)
    if filled > slots:
        raise PolicyError(
            f"pool: {name} has {slots} slots, and {filled} pages fill it: give as many slots, or fewer pages"
        )
    if isinstance(replacement, str) and replacement not in get_args(Replacement):
        known = ", ".join(map(repr, get_args(Replacement)))
        raise PolicyError(f"pool: replacement is {replacement!r}: give one of {known}, or an eviction rule")
    return slots


class Declarations(ReadOnly):
    """Declarations of a policy, other than pools and resident pages; a base class of `Plan`."""

    _assignable = frozenset({"discipline", "task_limit"})
    _remedy = "declare with the plan's methods, and keep your own numbers in attributes of the policy"

    def __init__(self, declared: Declared, default_task_limit: int) -> None:
        self._declared = declared
        self._default_task_limit = default_task_limit

    @property
    def declared(self) -> Declared:
        """Everything that the policy has declared so far, besides pools and resident pages."""
        return self._declared

    @property
    def nodes(self) -> NodeShare:
        """This node's share of a model whose experts several nodes share."""
        return self._declared.nodes

    @property
    def discipline(self) -> Discipline:
        """The order in which lanes start tasks, "ready_first" or "in_order"; a policy may assign it in `plan`."""
        return self._declared.discipline

    @discipline.setter
    def discipline(self, discipline: Discipline) -> None:
        if discipline not in get_args(Discipline):
            known = " or ".join(map(repr, get_args(Discipline)))
            raise PolicyError(f"discipline is {discipline!r}: assign {known}")
        self._declare("discipline", replace(self._declared, discipline=discipline))

    @property
    def task_limit(self) -> int:
        """Largest number of tasks that a step may submit; a policy may assign another number in `plan`.

        The default is far above the needs of policies. For each micro-batch of prefill, it allows 20 tasks for each
        page of the model, 400 tasks for each layer, and 20 tasks for each expert of each layer.
        """
        return self._declared.task_limit or self._default_task_limit

    @task_limit.setter
    def task_limit(self, limit: int) -> None:
        limit = require_whole("task_limit", limit, least=1)
        self._declare("task_limit", replace(self._declared, task_limit=limit))

    def request_scores(self) -> None:
        """Have the values of `route` and `preview_route` include the router's scores, as `.scores`.

        The value is still a mapping {expert: tokens}. Its `scores` has one number for each expert of the layer: the
        router's probability, averaged over the micro-batch's tokens. On the virtual clock no router runs: the scores
        are those of the run's routing or, if it has none, the experts' shares of the micro-batch's choices.

        Raises:
            PolicyError: the plan is centralised, so that only the first node has a router.
        """
        declared = replace(self._declared, scores=True)
        require_routers("request_scores", declared)
        self._declare("request_scores", declared)

    def _declare(self, verb: str, declared: Declared) -> None:
        if self._declared.settled:
            raise PolicyError(f"{verb}: the plan is made and its memory reserved: declare it in Policy.plan")
        self._declared = declared

"""The roles of memories, by which policies name them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from moesched.errors import PolicyError
from moesched.machines import Machine

Role = Literal["accelerator", "host", "pinned"]

ROLES: tuple[Role, ...] = get_args(Role)

KV_ROLES: tuple[Role, ...] = ("accelerator", "host")
"""The memories that may hold a KV cache."""


def role_named(verb: str, name: str, machine: Machine, roles: Sequence[Role] = ROLES) -> Role:
    """Return the role of a memory ("accelerator", "host" or "pinned") that a policy means by a name.

    The name of a unified memory means two roles. The first of them is returned if all roles are allowed. Otherwise the
    policy has to give the name of the role: for a KV cache, the role decides which processor computes attention.

    Args:
        verb: name of the method that was called, for messages.
        name: a role, or the name of a memory of the machine.
        roles: the roles that are allowed.

    Raises:
        PolicyError: `name` means no allowed role, or two of them where one has to be named.
    """
    own = dict(_own_names(machine))
    named = [role for role in roles if role == name] or [role for role in roles if own.get(role) == name]
    if len(named) == 1 or (named and roles is ROLES):
        return named[0]
    known = " or ".join(
        f"{role!r}" + (f" ({own[role]})" if own.get(role, role) != role else "") for role in roles
    )
    problem = "is both" if named else "is no memory for that"
    raise PolicyError(f"{verb}: {name!r} {problem} on machine {machine.name}: give {known}")


def _own_names(machine: Machine) -> Iterator[tuple[Role, str]]:
    roles = machine.roles
    yield "accelerator", machine.processors[roles.accelerator].memory
    yield "host", machine.processors[roles.host].memory
    if roles.pinned is not None:
        yield "pinned", roles.pinned

"""The condition of checks that are assert statements: a Python that carries them out."""

from __future__ import annotations

from moesched.errors import BadInput


def require_asserts(check: str) -> None:
    """Require that assert statements are carried out.

    Raises:
        BadInput: Python was started with -O or -OO.
    """
    if not __debug__:
        raise BadInput(f"{check} finds faults with assert statements, which python -O leaves out: omit -O")

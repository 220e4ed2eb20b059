"""A test of whether Python runs assert statements, for checks that consist of such statements."""

from __future__ import annotations

from moesched.errors import BadInput


def require_asserts(check: str) -> None:
    """Check that Python runs assert statements.

    check: name of the function that needs them, for the error message.

    Raises:
        BadInput: Python was started with -O or -OO.
    """
    if not __debug__:
        raise BadInput(f"{check} finds faults with assert statements, which python -O leaves out: omit -O")

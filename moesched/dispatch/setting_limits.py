"""Checks policies' settings against limits; the error names the nearest allowed value."""

from __future__ import annotations

from moesched.errors import BadInput


def require_at_least(least: int, **settings: int) -> None:
    """Check that each setting, passed as a keyword argument, is at least `least`.

    Raises:
        BadInput: a setting is lower.
    """
    for name, value in settings.items():
        if value < least:
            raise BadInput(f"{name} is {value:,}: give {least:,} or more")


def require_at_most(most: int, what: str, **settings: int) -> None:
    """Check that each setting, passed as a keyword argument, is at most `most`; -1 means as many as fit and is allowed.

    Args:
        what: words for the limit in the error message, such as "mixtral-8x7b has 256 experts".

    Raises:
        BadInput: a setting is higher.
    """
    for name, value in settings.items():
        if value > most:
            raise BadInput(
                f"{name} is {value:,}, and {what}: give at most {most:,}, or -1 for as many as fit"
            )

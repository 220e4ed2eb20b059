"""Limits of policies' settings: a value beyond them is refused with the nearest one that is allowed."""

from __future__ import annotations

from moesched.errors import BadInput


def require_at_least(least: int, **settings: int) -> None:
    """Require the least value of settings, by name.

    Raises:
        BadInput: one is lower.
    """
    for name, value in settings.items():
        if value < least:
            raise BadInput(f"{name} is {value:,}: give {least:,} or more")


def require_at_most(most: int, what: str, **settings: int) -> None:
    """Require the largest value of settings whose -1 stands for as many as fit.

    Args:
        what: has that number, such as "mixtral-8x7b has 256 experts".

    Raises:
        BadInput: one is higher.
    """
    for name, value in settings.items():
        if value > most:
            raise BadInput(
                f"{name} is {value:,}, and {what}: give at most {most:,}, or -1 for as many as fit"
            )

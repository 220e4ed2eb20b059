"""Search for the known name that is most similar to a misspelt one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest_of(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like `name`; None if none is like it."""
    names = {_plain(each): each for each in known}
    return next((names[each] for each in get_close_matches(_plain(name), names, 1)), None)


def with_nearest(name: str, known: Iterable[str], remedy: str) -> str:
    """Return the remedy for an unknown name: `remedy`, after the question "did you mean …?" if a known name is similar.

    If `name` consists of known names with commas between them, the result is the advice to give only one of them.

    Args:
        remedy: advice that does not depend on similar names, such as "choose one of a, b".
    """
    known = list(known)
    if all(part.strip() in known for part in name.split(",")):
        return "name one of them; `moesched sweep` takes several values of its options"
    near = nearest_of(name, known)
    return remedy if near is None else f"did you mean {near}? Otherwise {remedy}"


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(" ", "-")

"""Changes of what a policy sees: attributes assigned, containers changed, along any path of public names."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from random import Random
from types import BuiltinFunctionType, FunctionType
from typing import Any

from moesched.tasks import Task

LEAVES = (int, float, str, bytes, type(None), type, FunctionType, BuiltinFunctionType, Task)
"""Types of values that nothing else is reached through. Handles of tasks are the engine's."""
CONTAINERS = (Mapping, list, tuple, set, frozenset, deque, range)
DEPTH = 5


def attributes(seen: object) -> list[str]:
    """Names of an object's public attributes that are no methods."""
    if isinstance(seen, CONTAINERS) and not hasattr(seen, "_fields"):
        return []
    names = [name for name in dir(seen) if not name.startswith("_")]
    return [name for name in names if not callable(getattr(seen, name)) or name == "slot_bytes"]


def children(seen: object) -> Iterator[tuple[str, object]]:
    """Everything that an object shows by an attribute, a key or an index, each with that part of its path."""
    if isinstance(seen, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in seen.items())
    elif isinstance(seen, (list, tuple, set, frozenset, deque)):
        yield from ((f"[{number}]", value) for number, value in enumerate(seen))
    yield from ((f".{name}", getattr(seen, name)) for name in attributes(seen))


def reachable(root: object, name: str) -> Iterator[tuple[str, object]]:
    """Everything that public names lead to, each once, with its path."""
    found: set[int] = set()
    left = deque([(name, root)])
    while left:
        path, each = left.popleft()
        if isinstance(each, LEAVES) or id(each) in found:
            continue
        found.add(id(each))
        yield path, each
        left += [(path + part, child) for part, child in children(each)]


def meddle(choose: Random, roots: Mapping[str, object], how: str) -> None:
    """Change something that a random path from one of the roots leads to.

    Args:
        how: "assign" an attribute, or "mutate" a container.
    """
    _, each = _somewhere(choose, *choose.choice(list(roots.items())), how)
    if how == "assign":
        name = choose.choice(attributes(each) or ["mine"])
        setattr(each, name, _another(choose, getattr(each, name, None)))
    else:
        change: Callable[[Any], object] = choose.choice(MUTATIONS)
        change(each)


def _somewhere(choose: Random, path: str, each: object, how: str) -> tuple[str, object]:
    """A random object that may be changed in this way, at the end of a path."""
    last = path, each
    for _ in range(choose.randint(1, DEPTH)):
        inner = [(part, child) for part, child in children(each) if not isinstance(child, LEAVES)]
        if not inner:
            break
        part, each = choose.choice(inner)
        path += part
        if isinstance(each, CONTAINERS) if how == "mutate" else attributes(each):
            last = path, each
    return last


def _another(choose: Random, value: object) -> object:
    """A value like another one, but wrong."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return choose.choice([0, value - 1, value + 1, 2 * value])
    if isinstance(value, (range, tuple, list)):
        return choose.choice([value[:-1], value[1:], value[::-1]])
    if isinstance(value, Mapping):
        return dict(list(value.items())[:-1])
    return None


def _swap(seen: Any) -> None:
    keys = list(seen) if isinstance(seen, Mapping) else range(len(seen))
    seen[keys[0]], seen[keys[-1]] = seen[keys[-1]], seen[keys[0]]


def _delete(seen: Any) -> None:
    del seen[next(iter(seen)) if isinstance(seen, Mapping) else 0]


MUTATIONS: tuple[Callable[[Any], object], ...] = (
    lambda seen: seen.pop(),
    lambda seen: seen.clear(),
    lambda seen: seen.append(0),
    lambda seen: seen.update({0: 1}),
    _swap,
    _delete,
)

"""Policies that count the awaits of their decode steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Generator
from types import coroutine
from typing import Any

from moesched.plugins import find
from moesched.steps.step import Step
from moesched.tasks import Task

awaits: Counter[int] = Counter()
"""Awaits of the policy, by step."""


@coroutine
def counted(main: Coroutine[Task, None, None], index: int) -> Generator[Task, None, None]:
    """Count how often a policy's coroutine awaits something that is not done yet."""
    try:
        while True:
            handle = main.send(None)
            awaits[index] += 1
            yield handle
    except StopIteration:
        return


def counting(name: str) -> type:
    """A policy that counts its awaits in decode steps."""
    policy: Any = find("policies", name)

    async def decode(self: Any, step: Step) -> None:
        await counted(policy.decode(self, step), step.index)

    return type(name, (policy,), {"decode": decode})


POLICIES = ("resident", "cgopipe", "twiddler", "expert_cache")
globals().update({name: counting(name) for name in POLICIES})

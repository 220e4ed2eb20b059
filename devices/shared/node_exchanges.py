"""The exchanges between nodes, as numpy arrays, and the tokens that only the first node samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np

from moesched.seams import Exchange, Transport
from moesched.steps.node_tasks import SUM, TOKENS
from moesched.steps.plan import Plan
from moesched.tasks import Collective, Task

if TYPE_CHECKING:
    from moesched.seams import Array

FIRST = 0
"""The node that attends and samples in a centralised plan."""


def exchange_of(task: Collective) -> Exchange:
    """A collective as transports name it."""
    return Exchange(task.ticket, task.signature, task.step, task.layer)


class NodeExchanges:
    """Exchanges of what a task before left in `told`; what comes of it is there for the task behind.

    Args:
        told: what nodes tell each other, by what it is, of each micro-batch.
        on_host: the array of what a task left.
        sample: chooses a micro-batch's tokens, where the node attends.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        told: Sequence[dict[str, Any]],
        on_host: Callable[[Any], Array],
        sample: Callable[[Task], list[int]] | None,
    ) -> None:
        self._node = plan.nodes.index
        self._transport = transport
        self._told = told
        self._on_host = on_host
        self._sample = sample
        self.verbs: Mapping[str, Callable[[Any], Any]] = {
            "all_reduce": self._all_reduce,
            "gather": self._gather,
            "broadcast": self._broadcast,
        }
        self.token_verbs: Mapping[str, Callable[[Any], Any]] = {}
        if plan.nodes.centralised:
            self.token_verbs = {"sample": self._sample_for_all if plan.nodes.attends else self._take_tokens}

    def _all_reduce(self, task: Collective) -> None:
        told = self._told[task.micro_batch]
        told[SUM] = self._transport.all_reduce(self._node, exchange_of(task), self._on_host(told[SUM]))

    def _gather(self, task: Collective) -> None:
        told = self._told[task.micro_batch]
        part = self._on_host(told.pop(SUM))
        parts = self._transport.gather(self._node, exchange_of(task), part, FIRST)
        if parts is not None:
            told[SUM] = reduce(add, parts)

    def _broadcast(self, task: Collective) -> None:
        told = self._told[task.micro_batch]
        array = self._transport.broadcast(self._node, exchange_of(task), told.pop(task.operands, None), FIRST)
        if self._node != FIRST:
            told[task.operands] = array

    def _sample_for_all(self, task: Task) -> list[int]:
        assert self._sample is not None, "the node attends"
        tokens = self._sample(task)
        self._told[task.micro_batch][TOKENS] = np.array(tokens, dtype=np.int64)
        return tokens

    def _take_tokens(self, task: Task) -> list[int]:
        tokens: list[int] = self._told[task.micro_batch].pop(TOKENS).tolist()
        return tokens

"""The verbs (kinds of tasks) by which nodes that share a model's experts exchange numpy arrays over a transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from moesched.seams import Abandons, Exchange, Transport
from moesched.steps.node_tasks import ROWS, SUM, TOKENS
from moesched.steps.plan import Plan
from moesched.tasks import Collective, Task

from .verbs import Verb

if TYPE_CHECKING:
    from moesched.seams import Array

FIRST = 0
"""Index of the node that attends and samples in a centralised plan."""


def exchange_of(task: Collective) -> Exchange:
    """Describe a collective task as an `Exchange`, the form that transports take."""
    return Exchange(task.ticket, task.signature, task.step, task.layer)


@contextmanager
def making_part(transport: Transport, rank: int, task: Collective) -> Iterator[None]:
    """Return a context in which this rank computes its part of an exchange.

    An error in the context is reported to the other ranks if the transport can do that.
    """
    try:
        yield
    except Exception as error:
        if isinstance(transport, Abandons):
            transport.abandon(rank, exchange_of(task), str(error))
        raise


class NodeKernels(Protocol):
    """The interface of a device's computations before and after the exchanges between nodes."""

    def partial_sum(self, task: Task) -> Any:
        """Return the weighted sum (T, D), float32, of the outputs of this node's own experts, on the device."""

    def on_host(self, tensor: Any) -> Array:
        """Copy a tensor of the device to the host's memory; called on the thread that exchanges data."""

    def combine(self, task: Task, total_TD: Array) -> None:
        """Add the residual to `total_TD`, the sum over all nodes; the result, rounded once, is the hidden states."""

    def route(self, task: Task) -> tuple[dict[int, int], Array]:
        """Run the router; returns each chosen expert's number of rows, and the router's result for the other nodes."""

    def take_rows(self, task: Task, routed_TX: Array) -> dict[int, int]:
        """Take over the router's result that the first node sent; returns each chosen expert's number of rows."""


class NodeVerbs:
    """Runs the verbs (kinds of tasks) that exist only where several nodes (machines) share a model's experts.

    Arrays to exchange, and results of exchanges, are kept by micro-batch and kind of data until a task takes them. The
    kinds are SUM, ROWS (the router's results) and TOKENS.

    Args:
        kernels: the device's computations.
        sample: function that runs the verb `sample` for a task; None on a node that computes no attention.
    """

    def __init__(
        self,
        plan: Plan,
        transport: Transport,
        kernels: NodeKernels,
        sample: Callable[[Task], Any] | None = None,
    ) -> None:
        self._nodes = plan.nodes
        self._transport = transport
        self._kernels = kernels
        self._sample = sample
        self._exchanged: dict[tuple[int, str], Any] = {}

    @property
    def verbs(self) -> Mapping[str, Verb]:
        """The functions that run this node's tasks, by the name of the verb (kind of task)."""
        verbs: dict[str, Verb] = {
            "partial_sum": self._partial_sum,
            "all_reduce": self._all_reduce,
            "gather": self._gather,
            "broadcast": self._broadcast,
            "combine": self._combine,
        }
        if self._nodes.centralised and self._nodes.attends:
            verbs |= {"route": self._route_for_all, "sample": self._sample_for_all}
        elif self._nodes.centralised:
            verbs |= {"route": self._take_rows, "sample": self._take_tokens}
        return verbs

    def _partial_sum(self, task: Task) -> None:
        self._exchanged[task.micro_batch, SUM] = self._kernels.partial_sum(task)

    def _combine(self, task: Task) -> None:
        self._kernels.combine(task, self._exchanged.pop((task.micro_batch, SUM)))

    def _route_for_all(self, task: Task) -> dict[int, int]:
        counts, self._exchanged[task.micro_batch, ROWS] = self._kernels.route(task)
        return counts

    def _take_rows(self, task: Task) -> dict[int, int]:
        return self._kernels.take_rows(task, self._exchanged.pop((task.micro_batch, ROWS)))

    def _sample_for_all(self, task: Task) -> list[int]:
        assert self._sample is not None, "the node attends"
        tokens: list[int] = self._sample(task)
        self._exchanged[task.micro_batch, TOKENS] = np.array(tokens, dtype=np.int64)
        return tokens

    def _take_tokens(self, task: Task) -> list[int]:
        tokens: list[int] = self._exchanged.pop((task.micro_batch, TOKENS)).tolist()
        return tokens

    def _part(self, task: Collective, tensor: Any) -> Array:
        with making_part(self._transport, self._nodes.index, task):
            return self._kernels.on_host(tensor)

    def _all_reduce(self, task: Collective) -> None:
        key = task.micro_batch, SUM
        part = self._part(task, self._exchanged[key])
        self._exchanged[key] = self._transport.all_reduce(self._nodes.index, exchange_of(task), part)

    def _gather(self, task: Collective) -> None:
        key = task.micro_batch, SUM
        part = self._part(task, self._exchanged.pop(key))
        parts = self._transport.gather(self._nodes.index, exchange_of(task), part, FIRST)
        if parts is not None:
            self._exchanged[key] = reduce(add, parts)

    def _broadcast(self, task: Collective) -> None:
        key = task.micro_batch, task.operands
        part = self._exchanged.pop(key, None)
        array = self._transport.broadcast(self._nodes.index, exchange_of(task), part, FIRST)
        if self._nodes.index != FIRST:
            self._exchanged[key] = array

"""The symbolic device's verbs for nodes that share experts, and the board through which nodes exchange data."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from moesched.steps.node_tasks import ROWS, SUM, TOKENS
from moesched.steps.reservations import NodeShare
from moesched.tasks import Task
from moesched.testing.symbolic.data import Access
from moesched.testing.symbolic.experts import Experts


class Board:
    """The values that nodes of one process exchange: each node posts its part, and reads the parts of all."""

    def __init__(self) -> None:
        self._posted: dict[tuple[str, int, int, int], dict[int, Any]] = {}
        self._lock = threading.Lock()

    def post(self, task: Task, data: str, node: int, value: Any) -> None:
        """Store a node's part of an exchange.

        Args:
            task: a task of the step, layer and micro-batch to which the exchange belongs.
            data: the kind of exchanged data: `SUM`, `ROWS` or `TOKENS`.
            node: index of the node.
            value: for `SUM`, hashes of output rows by key; for `ROWS`, the hash of the input rows; for `TOKENS`, ids.
        """
        with self._lock:
            self._posted.setdefault((data, task.step, task.layer, task.micro_batch), {})[node] = value

    def posted(self, task: Task) -> list[Any]:
        """Return all nodes' parts of an exchange, in the order of the nodes.

        task: the task of a node that receives the parts.
        """
        with self._lock:
            posted = self._posted[task.operands, task.step, task.layer, task.micro_batch]
            return [posted[node] for node in sorted(posted)]


class Exchanges:
    """Computes the verbs (kinds of tasks) that sum over nodes, or send results of the only node that runs attention."""

    def __init__(self, nodes: NodeShare, experts: Experts, board: Board) -> None:
        self._nodes = nodes
        self._experts = experts
        self._board = board

    def partial_sum(self, task: Task, data: Access) -> None:
        """Post the output rows of the experts that this node ran, as hashes from `data`, for the sum over all nodes."""
        own = [e for e, node in task.operands.items() if node == self._nodes.index]
        self._post(task, SUM, self._experts.outputs_of(own, task, data))

    def all_reduce(self, task: Task, data: Access) -> None:
        """Copy into this node's `data` the output rows that all nodes posted."""
        for outputs in self._board.posted(task):
            for row, output in outputs.items():
                data.write(row, output)

    def gather(self, task: Task, data: Access) -> None:
        """Copy into `data` the output rows that all nodes posted; on nodes other than the first, do nothing."""
        if self._nodes.attends:
            self.all_reduce(task, data)

    def broadcast(self, task: Task, data: Access) -> None:
        """Copy into `data` the rows or tokens that the first node posted; the first node only reads them in `data`."""
        key = ("normed" if task.operands == ROWS else "tokens", task.micro_batch)
        if self._nodes.attends:
            data.read(key)
        else:
            data.write(key, self._board.posted(task)[0])

    def route_for_all(self, task: Task, data: Access) -> Mapping[int, int]:
        """Run the router on the first node, and post the experts' input rows; return the number of rows by expert."""
        routed = self._experts.route(task, data)
        self._post(task, ROWS, data.writes["normed", task.micro_batch])
        return routed

    def sample_for_all(self, task: Task, data: Access) -> list[int]:
        """Sample a token id for each request on the first node, post the ids for the other nodes, and return them."""
        tokens = self._experts.sample(task, data)
        self._post(task, TOKENS, tokens)
        return tokens

    def sampled(self, task: Task, data: Access) -> list[int]:
        """Return the token ids that the first node sampled, from `data`; for a node without attention."""
        tokens: Any = data.read(("tokens", task.micro_batch))
        return list(tokens)

    def _post(self, task: Task, data: str, value: Any) -> None:
        self._board.post(task, data, self._nodes.index, value)

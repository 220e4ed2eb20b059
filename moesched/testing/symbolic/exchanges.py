"""The verbs that exist only where several nodes share the experts, and the board on which the nodes post data."""

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
    """The values that the nodes of one process post for their exchanges."""

    def __init__(self) -> None:
        self._posted: dict[tuple[str, int, int, int], dict[int, Any]] = {}
        self._lock = threading.Lock()

    def post(self, task: Task, data: str, node: int, value: Any) -> None:
        """Post a node's contribution to the exchange that follows a task."""
        with self._lock:
            self._posted.setdefault((data, task.step, task.layer, task.micro_batch), {})[node] = value

    def posted(self, task: Task) -> list[Any]:
        """Return the contributions to an exchange, in the order of the nodes."""
        with self._lock:
            posted = self._posted[task.operands, task.step, task.layer, task.micro_batch]
            return [posted[node] for node in sorted(posted)]


class Exchanges:
    """Verbs for sums over nodes, and for results that the first node of a centralised plan sends to the others."""

    def __init__(self, nodes: NodeShare, experts: Experts, board: Board) -> None:
        self._nodes = nodes
        self._experts = experts
        self._board = board

    def partial_sum(self, task: Task, data: Access) -> None:
        """Post the outputs of the node's own experts."""
        own = [e for e, node in task.operands.items() if node == self._nodes.index]
        self._post(task, SUM, self._experts.outputs_of(own, task, data))

    def all_reduce(self, task: Task, data: Access) -> None:
        """Read the outputs that all nodes posted."""
        for outputs in self._board.posted(task):
            for row, output in outputs.items():
                data.write(row, output)

    def gather(self, task: Task, data: Access) -> None:
        """Read the outputs that all nodes posted, on the first node; other nodes do nothing."""
        if self._nodes.attends:
            self.all_reduce(task, data)

    def broadcast(self, task: Task, data: Access) -> None:
        """Read the value that the first node posted."""
        key = ("normed" if task.operands == ROWS else "tokens", task.micro_batch)
        if self._nodes.attends:
            data.read(key)
        else:
            data.write(key, self._board.posted(task)[0])

    def route_for_all(self, task: Task, data: Access) -> Mapping[int, int]:
        """Route tokens on the first node, post its rows for the others; returns the rows of each expert."""
        routed = self._experts.route(task, data)
        self._post(task, ROWS, data.writes["normed", task.micro_batch])
        return routed

    def sample_for_all(self, task: Task, data: Access) -> list[int]:
        """Sample on the first node, and post the tokens for the others; returns them."""
        tokens = self._experts.sample(task, data)
        self._post(task, TOKENS, tokens)
        return tokens

    def sampled(self, task: Task, data: Access) -> list[int]:
        """Return the tokens that the first node sampled."""
        tokens: Any = data.read(("tokens", task.micro_batch))
        return list(tokens)

    def _post(self, task: Task, data: str, value: Any) -> None:
        self._board.post(task, data, self._nodes.index, value)

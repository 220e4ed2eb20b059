"""Nodes that are lost while the others are ahead or behind: each token is counted once, and in its place."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from clusters import cluster
from moesched.cluster.launcher import Launch
from moesched.cluster.messages import Begin, Failed, Order, Stop
from moesched.cluster.node_reports import NodeReports
from moesched.cluster.roster import Lost, Node
from moesched.cluster.token_log import TokenLog
from moesched.inputs.options import SizeOptions
from test_roster import FakeProcess

PROMPTS = [[1, 2, 3], [4, 5], [6]]
NEW_TOKENS = 6


def next_token(text: Sequence[int]) -> int:
    """The token that follows a text, on every node; a token twice or not at all changes all later ones."""
    return (sum(text) * 31 + len(text)) % 97


def whole(prompt: Sequence[int]) -> list[int]:
    text = list(prompt)
    for _ in range(NEW_TOKENS):
        text.append(next_token(text))
    return text[len(prompt) :]


class LosingRoster:
    """Nodes that hold all experts, say their tokens in an order that is drawn, and of which one is lost.

    Args:
        lost: the rank of that node.
        at: number of messages of tokens after which it is lost.
        together: requests whose tokens come in one message.
    """

    def __init__(self, draw: random.Random, lost: int, at: int, together: int) -> None:
        self.nodes = [Node(host, FakeProcess()) for host in cluster().hosts]
        for node in self.nodes:
            node.peer = b"connected"
        self.members: list[Node] = []
        self._draw = draw
        self._lost, self._left = self.nodes[lost], at
        self._together = together
        self._said: dict[int, deque[Any]] = {node.host.rank: deque() for node in self.nodes}
        self._reports = {rank: NodeReports(said.append) for rank, said in self._said.items()}

    def hear(self, seconds: float) -> Iterator[tuple[Node, Any]]:
        speaking = [node for node in self.nodes if node.peer and self._said[node.host.rank]]
        if speaking:
            node = self._draw.choice(speaking)
            message = self._said[node.host.rank].popleft()
            self._left -= type(message).__name__ == "Tokens"
            yield node, message

    def look_after(self) -> None:
        if self._left <= 0:
            self._lost.lost, self._lost.peer = "its process ended", None
        if self._lost.lost and self._lost in self.members:
            raise Lost(self._lost)

    def say(self, node: Node, message: Any) -> None:
        said, reports = self._said[node.host.rank], self._reports[node.host.rank]
        match message:
            case Order():
                reports.order = message
                reports.prepared(1, SizeOptions(), [[0, 1]] * len(message.members))
            case Begin():
                reports.begin()
                reports.loaded()
                self._compute(reports)
            case Stop():
                kept = self._draw.randint(0, len(said))
                while len(said) > kept:
                    said.pop()
                said.append(Failed(epoch=message.epoch, order=0, kind="stopped", message=message.reason))

    def _compute(self, reports: NodeReports) -> None:
        order = reports.order
        assert order is not None
        texts = [list(prompt) for prompt in order.prompts]
        for _ in range(order.new_tokens):
            for start in range(0, len(texts), self._together):
                fresh = {}
                for place in range(start, min(start + self._together, len(texts))):
                    texts[place].append(next_token(texts[place]))
                    fresh[order.first_request + place] = [texts[place][-1]]
                reports.tokens(fresh, [], 0.0)
        reports.done("")


@given(st.randoms(use_true_random=False), st.integers(0, 1), st.integers(1, 40), st.integers(1, 3))
def test_whoever_is_lost_however_far_the_others_are_no_token_is_counted_twice_or_left_out(
    draw: random.Random, lost: int, at: int, together: int
) -> None:
    roster: Any = LosingRoster(draw, lost, at, together)
    log = TokenLog(PROMPTS, NEW_TOKENS, [])
    Launch(roster, log, SizeOptions()).run()
    assert log.tokens == [whole(prompt) for prompt in PROMPTS]

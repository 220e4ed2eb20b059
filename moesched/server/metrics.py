"""Metrics of the server, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from moesched.server.generation import AnswerPiece, AnswersInProgress
from moesched.server.messages import State

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """Counters, gauges and histograms of a server.

    Args:
        state: returns the engine's state.
        clock: returns the time in seconds.
    """

    def __init__(self, state: Callable[[], State], clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._registry = registry = CollectorRegistry()
        self._state = state
        self.responses = Counter(
            "moesched_responses", "Responses by path and status.", ["path", "status"], registry=registry
        )
        self._prompt_tokens = Counter("moesched_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._answer_tokens = Counter("moesched_answer_tokens", "Tokens of answers.", registry=registry)
        self._first = Histogram(
            "moesched_time_to_first_token_seconds",
            "From the request to its first token.",
            buckets=SECONDS,
            registry=registry,
        )
        self._each = Histogram(
            "moesched_time_per_token_seconds",
            "Mean time from one token of an answer to its next, by request.",
            buckets=SECONDS,
            registry=registry,
        )
        self._gauges = {
            "running": Gauge("moesched_requests_running", "Requests that run.", registry=registry),
            "waiting": Gauge(
                "moesched_requests_waiting", "Requests that wait for a place.", registry=registry
            ),
            "held": Gauge("moesched_kv_tokens_held", "Tokens of the KV cache in use.", registry=registry),
            "room": Gauge("moesched_kv_tokens_room", "Tokens of the KV cache in all.", registry=registry),
            "steps": Gauge("moesched_steps", "Steps so far.", registry=registry),
        }
        self._busy = Gauge(
            "moesched_lane_busy_seconds", "Seconds that a lane ran so far.", ["lane"], registry=registry
        )

    @contextmanager
    def counted(self, generation: AnswersInProgress) -> Iterator[None]:
        """Count a request's tokens: those of its prompts when the context begins, those of its answers when it ends."""
        self._prompt_tokens.inc(generation.prompt_tokens)
        try:
            yield
        finally:
            self._answer_tokens.inc(generation.answer_tokens)

    async def observed(self, generation: AnswersInProgress, came: float) -> AsyncGenerator[list[AnswerPiece]]:
        """Yield a generation's pieces; note the time to the first one, and the mean time from token to token.

        Args:
            came: the time at which the request came, by `clock`.
        """
        first: dict[int, float] = {}
        last: dict[int, float] = {}
        async with aclosing(generation.pieces()) as pieces:
            async for several in pieces:
                now = self.clock()
                if not first:
                    self._first.observe(now - came)
                for piece in several:
                    first.setdefault(piece.answer, now)
                    last[piece.answer] = now
                yield several
        following = generation.answer_tokens - len(first)
        if following > 0:
            self._each.observe((sum(last.values()) - sum(first.values())) / following)

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        state = self._state()
        for name, gauge in self._gauges.items():
            gauge.set(getattr(state, name))
        for lane, seconds in state.busy.items():
            self._busy.labels(lane).set(seconds)
        return generate_latest(self._registry)

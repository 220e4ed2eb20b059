"""The state of a micro-batch while serving: its requests join and leave between steps."""

from __future__ import annotations

from collections.abc import Sequence

from moesched.models.replayed import SERVED_MEMORIES
from moesched.requests.next_token import NO_TOKEN
from moesched.requests.rows import Row, Rows

from .micro_batch import MicroBatchState


class ServedState(MicroBatchState):
    """The state of a micro-batch while serving, which also keeps the last sampled token of each request."""

    ends_alone = True
    most_memories = SERVED_MEMORIES

    def __init__(self) -> None:
        super().__init__((), ())
        self._sampled: dict[int, int] = {}
        """The token that was sampled last, by request."""

    def begin(self, operands: Rows) -> None:
        """Begin a step with the rows `operands`: drop departed requests from the caches, and add those that are new."""
        for request in operands.departed:
            self._sampled.pop(request, None)
            for cache in self.caches:
                cache.close(request)
        for row in operands.rows:
            if row.start == 0:
                for cache in self.caches:
                    cache.open(row.request, row.cache_tokens)
        self.requests = self.sequences = tuple(row.request for row in operands.rows)
        self.new = list(map(self._ids, operands.rows))
        ending = [row for row in operands.rows if row.ends]
        self.samplings = [row.sampling for row in ending]
        wanted = [row.logprobs for row in ending]
        self.logprobs = wanted if any(wanted) else None
        self.following = [row.following for row in operands.rows] if self.logprobs else []
        all_of_them = len(ending) == len(operands.rows)
        self.ends = None if all_of_them else [place for place, row in enumerate(operands.rows) if row.ends]

    def _ids(self, row: Row) -> list[int]:
        return [self._sampled[row.request]] if row.ids is None else list(row.ids)

    def hand_on(self, tokens: Sequence[int]) -> None:
        """Keep each request's sampled token as the request's input of a later step.

        A request whose logits are not finite gets NO_TOKEN. It is still in the next step, which has been submitted
        already; its input there is token 0.
        """
        mine = self.requests if self.ends is None else [self.requests[end] for end in self.ends]
        inputs = (0 if token == NO_TOKEN else int(token) for token in tokens)
        self._sampled.update(zip(mine, inputs, strict=True))

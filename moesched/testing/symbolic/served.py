"""Places on symbols: micro-batches whose requests join and leave, and the tokens that their rows must give."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from moesched.requests.rows import Row, Rows
from moesched.steps.plan import Plan
from moesched.tasks import Task
from moesched.testing.symbolic.attention import Attention
from moesched.testing.symbolic.batch import SymbolicBatch
from moesched.testing.symbolic.data import Access, Key
from moesched.testing.symbolic.model import (
    append,
    attend,
    embed,
    first_tokens,
    positions,
    sample,
    symbol,
    through_layers,
)


class ServedBatch(SymbolicBatch):
    """The places of a run, as the verbs of a symbolic device need them.

    Attributes:
        history: the rows of each place, step by step.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._attends = plan.nodes.attends
        self.history: defaultdict[int, list[Rows]] = defaultdict(list)

    def prompts(self) -> dict[Key, int]:
        """Return no data, since no request is there yet."""
        return {}

    def tokens(self, task: Task) -> int:
        """Return the number of tokens of a task's place in its step."""
        return sum(row.tokens for row in self._rows(task)) if self._attends else task.work.tokens

    def starts(self, task: Task) -> tuple[int, ...]:
        """Return the number of tokens of each request before the step."""
        return tuple(row.start for row in self._rows(task))

    def continues(self, task: Task) -> bool:
        """Test whether a task's place decodes; prompts continue none, as they are whole with a cache on the host."""
        return task.phase == "decode"

    def whole(self, task: Task) -> int:
        """Return the number of the place."""
        return task.micro_batch

    def _rows(self, task: Task) -> Sequence[Row]:
        return self.history[task.micro_batch][-1].rows


class ServedAttention(Attention):
    """The verbs from tokens to attention's output, where a step of a place has rows of its own."""

    def __init__(self, batch: ServedBatch) -> None:
        super().__init__(batch)
        self._served = batch

    def embed(self, task: Task, data: Access) -> None:
        """Note the rows of a step, and look up their tokens."""
        j, rows = task.micro_batch, task.operands
        self._served.history[j].append(rows)
        data.write(self._batch.hidden(task), embedded(rows, data.read(("tokens", j))))
        data.write(("positions", j), positions(task.generated, self._batch.starts(task)))

    def _attend(self, task: Task, data: Access, source: Key, key: Key, held: int | None = None) -> int:
        """Append keys and values to the cache, and attend: whole prompts over their own, others over the cache."""
        qkv = data.read(source)
        cache = self._append(task, data, qkv, key, held)
        if task.phase == "prefill" and not any(self._batch.starts(task)):
            cache = append(0, qkv, data.read(("positions", task.micro_batch)))
        return attend(task.layer, qkv, cache)


def embedded(rows: Rows, held: int) -> int:
    """Return the symbol of a step's first hidden state, given the symbol of the place's tokens."""
    requests = [row.request for row in rows.rows]
    if rows.phase == "prefill":
        return embed(first_tokens(requests, [row.start for row in rows.rows]))
    return embed(symbol("held", held, *requests))


def expected_served(plan: Plan, history: Sequence[Rows]) -> dict[int, list[int]]:
    """Compute the tokens of each request that a place's rows must give, by request, without a schedule."""
    cache, held = dict.fromkeys(plan.layers, 0), 0
    tokens: defaultdict[int, list[int]] = defaultdict(list)
    for step in history:
        rows = step.rows
        where = positions(min(row.generated for row in rows), [row.start for row in rows])
        count = sum(row.tokens for row in rows)
        alone = step.phase == "prefill" and not any(row.start for row in rows)
        hidden = through_layers(plan.layout, embedded(step, held), cache, where, count, alone=alone)
        ending = [row for row in rows if row.ends]
        sampled = sample(hidden, [row.request for row in ending])
        held = symbol("tokens", held, *sampled) if ending else held
        for row, token in zip(ending, sampled, strict=True):
            if row.samples:
                tokens[row.request].append(token)
    return tokens

"""The symbolic device while serving: places (micro-batches whose requests join and leave), and the right tokens."""

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
    """Gives verbs (kinds of tasks) the sizes and data of a task's place: a micro-batch whose requests join and leave.

    Attributes:
        history: for each place, by index, the rows of every step so far; a row is one request's new tokens in a step.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._attends = plan.nodes.attends
        self.history: defaultdict[int, list[Rows]] = defaultdict(list)

    def prompts(self) -> dict[Key, int]:
        """Return no data, since there are no requests at the start."""
        return {}

    def tokens(self, task: Task) -> int:
        """Return the number of new tokens in this step, of all requests in the task's place (micro-batch)."""
        return sum(row.tokens for row in self._rows(task)) if self._attends else task.work.tokens

    def starts(self, task: Task) -> tuple[int, ...]:
        """Return the number of tokens that each request in the task's place had in earlier steps, row by row."""
        return tuple(row.start for row in self._rows(task))

    def continues(self, task: Task) -> bool:
        """Test whether the KV cache has entries of earlier steps for a task's rows: yes in decode, no in prefill.

        In prefill, only a prompt that is divided over several steps would have such entries. But this method is only
        called for a KV cache on the host, and then no prompt is divided.
        """
        return task.phase == "decode"

    def whole(self, task: Task) -> int:
        """Return the index of a task's place."""
        return task.micro_batch

    def _rows(self, task: Task) -> Sequence[Row]:
        return self.history[task.micro_batch][-1].rows


class ServedAttention(Attention):
    """Computes the verbs (kinds of tasks) up to attention's output, for places, whose rows differ from step to step."""

    def __init__(self, batch: ServedBatch) -> None:
        super().__init__(batch)
        self._served = batch

    def embed(self, task: Task, data: Access) -> None:
        """Record a step's rows in the place's history; write the hashes of their hidden state and positions."""
        j, rows = task.micro_batch, task.operands
        self._served.history[j].append(rows)
        data.write(self._batch.hidden(task), embedded(rows, data.read(("tokens", j))))
        data.write(("positions", j), positions(task.generated, self._batch.starts(task)))

    def _attend(self, task: Task, data: Access, source: Key, key: Key, held: int | None = None) -> int:
        """Append new keys and values to a KV cache in `data`, and return the hash of attention.

        Undivided prompts attend only over their own keys and values, all other rows over the cache.

        Args:
            source: key of the queries, keys and values.
            key: key of the cache.
            held: the hash of the cache before the append; None to read it at `key`.
        """
        qkv = data.read(source)
        cache = self._append(task, data, qkv, key, held)
        if task.phase == "prefill" and not any(self._batch.starts(task)):
            cache = append(0, qkv, data.read(("positions", task.micro_batch)))
        return attend(task.layer, qkv, cache)


def embedded(rows: Rows, held: int) -> int:
    """Return the hash of the hidden state before the first layer, for the rows of a step.

    held: the hash of the tokens so far in the micro-batch.
    """
    requests = [row.request for row in rows.rows]
    if rows.phase == "prefill":
        return embed(first_tokens(requests, [row.start for row in rows.rows]))
    return embed(symbol("held", held, *requests))


def expected_served(plan: Plan, history: Sequence[Rows]) -> dict[int, list[int]]:
    """Compute, without a schedule, the tokens that each request in a place must get, by request.

    history: the place's rows (each has one request's new tokens) in each step.
    """
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

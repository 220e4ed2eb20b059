"""The symbolic device's verbs (kinds of tasks) for experts and sampling, on one machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from moesched.routing.scores import with_shares
from moesched.tasks import HostKernel, Task
from moesched.testing.symbolic.batch import SymbolicBatch
from moesched.testing.symbolic.data import Access, Key
from moesched.testing.symbolic.model import (
    choose_experts,
    combine,
    expert,
    joined,
    project_output,
    sample,
    symbol,
)


class Experts:
    """Computes, with hashes, the verbs (kinds of tasks) from attention's output to the layer's output or to tokens."""

    def __init__(self, batch: SymbolicBatch) -> None:
        self._batch = batch

    def post_attention(self, task: Task, data: Access) -> None:
        """Write to `data` the hash of the layer's output, after output projection, router, experts and their sum."""
        weights = data.weights(task.operands)
        hidden = self._project_output(task, data, weights)
        outputs = [expert(task.layer, e, hidden, weights[e]) for e in self._choose(task, hidden)]
        data.write(self._batch.hidden(task), combine(hidden, outputs))

    def route(self, task: Task, data: Access) -> Mapping[int, int]:
        """Choose experts, and write the hash of their rows to `data`; return each chosen expert's number of rows.

        If the plan requests scores, an expert's score is its share of all choices.
        """
        hidden = self._project_output(task, data, data.weights(task.operands))
        data.write(self._batch.hidden(task), hidden)
        data.write(("normed", task.micro_batch), hidden)
        return self._with_scores(self._choose(task, hidden))

    def chosen(self, task: Task, data: Access) -> Mapping[int, int]:
        """Return, on a node without attention, the number of rows of each expert that the first node's router chose."""
        return self._choose(task, data.read(("normed", task.micro_batch)))

    def preview_route(self, task: Task, data: Access) -> Mapping[int, int]:
        """Return a guess at the number of rows of each expert that a later layer's router chooses."""
        hidden, weights = data.read(self._batch.hidden(task)), data.weights(task.operands)[-1]
        return self._with_scores(self._choose(task, symbol("preview", task.layer, hidden, weights)))

    def offload_routed(self, task: Task, data: Access) -> None:
        """Copy, in `data`, the hash of the experts' input rows from the accelerator to the host."""
        j = task.micro_batch
        data.write((f"normed{self._batch.on_host}", j), data.read(("normed", j)))

    def run_expert(self, task: Task, data: Access) -> None:
        """Write to `data` the hashes of an expert's output rows, for the rows of the task."""
        where = self._batch.on_host if isinstance(task, HostKernel) else ""
        weights = data.weights(task.operands)[task.expert]
        for j, start, stop in task.expert_rows:
            output = expert(task.layer, task.expert, data.read((f"normed{where}", j)), weights)
            for row in range(start, stop):
                data.write((f"output{where}", task.expert, j, row), output)

    def warm_expert(self, task: Task, data: Access) -> None:
        """Read an expert's weights and do nothing else: on hardware, this task keeps the weights in memory."""
        data.weights(task.operands)

    def load_routed(self, task: Task, data: Access) -> None:
        """Copy, in `data`, to the accelerator the hashes of the output rows that experts computed on the host."""
        j = task.micro_batch
        for e, rows in task.operands:
            for row in rows:
                data.write(("output", e, j, row), data.read((f"output{self._batch.on_host}", e, j, row)))

    def combine(self, task: Task, data: Access) -> None:
        """Write to `data` the hash of the sum of hidden state and chosen experts' outputs."""
        hidden = data.read(self._batch.hidden(task))
        outputs = [
            joined(data.read(key) for key in output_rows(e, task.micro_batch, tokens))
            for e, tokens in self._choose(task, hidden).items()
        ]
        data.write(self._batch.hidden(task), combine(hidden, outputs))

    def sample(self, task: Task, data: Access) -> list[int]:
        """Return the next token id of each request, computed from the hash of the hidden state."""
        key = ("tokens", self._batch.whole(task))
        tokens = sample(data.read(self._batch.hidden(task)), task.operands)
        data.write(key, symbol("tokens", data.read(key), *tokens))
        return tokens

    def outputs_of(self, experts: Iterable[int], task: Task, data: Access) -> dict[Key, int]:
        """Return the symbolic output rows of some experts for a task's micro-batch: a hash for each row's key.

        experts: numbers of the experts.
        """
        tokens = self._choose(task, data.read(("normed", task.micro_batch)))
        keys = (key for e in experts for key in output_rows(e, task.micro_batch, tokens[e]))
        return {key: data.read(key) for key in keys}

    def _project_output(self, task: Task, data: Access, weights: Mapping[int, int]) -> int:
        attention, hidden = data.read(("attention", task.micro_batch)), data.read(self._batch.hidden(task))
        return project_output(task.layer, attention, hidden, weights[-1])

    def _with_scores(self, tokens: Mapping[int, int]) -> Mapping[int, int]:
        return with_shares(tokens, self._batch.config.routed.experts) if self._batch.scores else tokens

    def _choose(self, task: Task, hidden: int) -> Mapping[int, int]:
        return choose_experts(self._batch.config, hidden, self._batch.tokens(task))


def output_rows(e: int, micro_batch: int, tokens: int) -> Iterator[Key]:
    """Yield the keys of the `tokens` output rows of expert `e`, for a micro-batch, on the accelerator."""
    return (("output", e, micro_batch, row) for row in range(tokens))

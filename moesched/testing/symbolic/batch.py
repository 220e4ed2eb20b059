"""The sizes and data of a batch's micro-batches, as the verbs of the symbolic device need them."""

from __future__ import annotations

from moesched.machines.group import numbered
from moesched.requests.chunks import Chunk
from moesched.steps.plan import Plan
from moesched.tasks import Task
from moesched.testing.symbolic.data import Key
from moesched.testing.symbolic.model import first_tokens


class SymbolicBatch:
    """Gives verbs (kinds of tasks) the sizes and data of a micro-batch; in prefill, each chunk is a micro-batch.

    Attributes:
        on_host: suffix of the keys of data in the host's memory; empty if the machine has one memory.
        scores: whether the plan requests router scores.
    """

    def __init__(self, plan: Plan) -> None:
        self.config = plan.layout.config
        self.scores = plan.declared.scores
        self.on_host = "" if plan.machine.unified else " on the host"
        self._micro_batches = plan.batch.micro_batches
        self._chunks = plan.chunks
        self._kv_roles = None if plan.machine.unified else plan.kv.roles
        self._memory_of = {
            numbered("accelerator", stage): memory.name for stage, memory in enumerate(plan.accelerators)
        }

    def prompts(self) -> dict[Key, int]:
        """Return the hashes of the prompts' tokens, by key; only these and the weights exist before the first task."""
        tokens: dict[Key, int] = {
            ("tokens", index): first_tokens(requests) for index, requests in enumerate(self._micro_batches)
        }
        for index, chunk in self._chunks.items():
            tokens["prompt", index] = first_tokens(chunk.requests, chunk.starts)
        return tokens

    def hidden(self, task: Task) -> Key:
        """Return the key of a micro-batch's hidden state in the memory of the accelerator on which a task runs."""
        return "hidden", task.micro_batch, self._memory_of[task.lane.name]

    def tokens(self, task: Task) -> int:
        """Return the number of a micro-batch's tokens that pass a layer in this task."""
        chunk = self._chunk(task)
        return len(self._micro_batches[task.micro_batch]) if chunk is None else sum(chunk.tokens)

    def starts(self, task: Task) -> tuple[int, ...]:
        """Return, for a prefill task, the number of tokens of each request in earlier chunks; empty for decode."""
        chunk = self._chunk(task)
        return () if chunk is None else chunk.starts

    def continues(self, task: Task) -> bool:
        """Test whether the KV cache of a task's micro-batch has entries of an earlier step or chunk."""
        chunk = self._chunk(task)
        return chunk is None or chunk.before >= 0

    def whole(self, task: Task) -> int:
        """Return the index of a task's micro-batch; in prefill, of the micro-batch that the chunk belongs to."""
        chunk = self._chunk(task)
        return task.micro_batch if chunk is None else chunk.micro_batch

    def _chunk(self, task: Task) -> Chunk | None:
        """Return the chunk of prompts that a prefill task computes; None for a decode task."""
        return None if task.phase == "decode" else self._chunks[task.micro_batch]

    def kv_on_host(self, task: Task) -> bool:
        """Test whether a layer's KV cache is in host memory; False on machines with a single memory."""
        return self._kv_roles is not None and self._kv_roles[self.whole(task)][task.layer] == "host"

"""The symbolic device's verbs (kinds of tasks) for embedding, attention, and copies between the memories."""

from __future__ import annotations

from moesched.tasks import Task
from moesched.testing.symbolic.batch import SymbolicBatch
from moesched.testing.symbolic.data import Access, Key
from moesched.testing.symbolic.model import append, attend, embed, positions, project


class Attention:
    """Computes, with hashes, the verbs (kinds of tasks) from the tokens to attention's output, on either processor."""

    def __init__(self, batch: SymbolicBatch) -> None:
        self._batch = batch

    def embed(self, task: Task, data: Access) -> None:
        """Write to `data` the hashes of the hidden state and token positions of a step, or of a chunk of prompts."""
        j = task.micro_batch
        tokens = "tokens" if task.phase == "decode" else "prompt"
        data.write(self._batch.hidden(task), embed(data.read((tokens, j))))
        data.write(("positions", j), positions(task.generated, self._batch.starts(task)))

    def pass_hidden(self, task: Task, data: Access) -> None:
        """Copy, in `data`, the hash of a hidden state from an accelerator to the next one of a pipeline."""
        source, destination = task.operands
        data.write(("hidden", task.micro_batch, destination), data.read(("hidden", task.micro_batch, source)))

    def pre_attention(self, task: Task, data: Access) -> None:
        """Write to `data` the hash of queries, keys and values, computed from hidden state and layer weights."""
        hidden = data.read(self._batch.hidden(task))
        data.write(("qkv", task.micro_batch), project(task.layer, hidden, data.weights(task.operands)))

    def attention(self, task: Task, data: Access) -> None:
        """Write to `data` the hash of the accelerator's attention output; the KV cache may be a copy of the host's."""
        batch, j = self._batch, task.micro_batch
        key, held = self._cache(task), None
        if batch.kv_on_host(task):
            decodes = task.phase == "decode"
            key = ("kv slot", task.operands) if decodes else ("kv of prompts", batch.whole(task))
            held = None if batch.continues(task) else 0  # ignores the keys and values of the previous layer
        data.write(("attention", j), self._attend(task, data, ("qkv", j), key, held))

    def cpu_attention(self, task: Task, data: Access) -> None:
        """Write to `data` the hash of the host's attention output, over the KV cache on the host."""
        j, where = task.micro_batch, self._batch.on_host
        output = self._attend(task, data, (f"qkv{where}", j), self._cache(task))
        data.write((f"attention{where}", j), output)

    def load_kv(self, task: Task, data: Access) -> None:
        """Copy, in `data`, the hash of a layer's KV cache from the host to a buffer on the accelerator."""
        data.read(("positions", task.micro_batch))
        data.write(("kv slot", task.operands), data.read(self._cache(task)))

    def offload_kv(self, task: Task, data: Access) -> None:
        """Append the hash of the new keys and values to the host's KV cache in `data`."""
        self._append(task, data, data.read(("qkv", task.micro_batch)), self._cache(task))

    def offload_qkv(self, task: Task, data: Access) -> None:
        """Copy, in `data`, the hash of queries, keys and values to the host."""
        j = task.micro_batch
        data.write((f"qkv{self._batch.on_host}", j), data.read(("qkv", j)))

    def load_hidden(self, task: Task, data: Access) -> None:
        """Copy, in `data`, the hash of the host's attention output to the accelerator."""
        j = task.micro_batch
        data.write(("attention", j), data.read((f"attention{self._batch.on_host}", j)))

    def _cache(self, task: Task) -> Key:
        return "kv", task.layer, self._batch.whole(task)

    def _attend(self, task: Task, data: Access, source: Key, key: Key, held: int | None = None) -> int:
        """Append new keys and values to a KV cache in `data`, and return the hash of attention over this cache.

        Args:
            source: key of the queries, keys and values.
            key: key of the cache.
            held: the hash of the cache before the append; None to read it at `key`.
        """
        qkv = data.read(source)
        return attend(task.layer, qkv, self._append(task, data, qkv, key, held))

    def _append(self, task: Task, data: Access, qkv: int, key: Key, held: int | None = None) -> int:
        before = data.read(key) if held is None else held
        cache = append(before, qkv, data.read(("positions", task.micro_batch)))
        data.write(key, cache)
        return cache

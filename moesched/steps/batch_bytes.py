"""Sizes in bytes of the memory that a plan reserves for a batch's micro-batches; weights are counted elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from moesched.models.footprint import (
    KEPT_ROWS,
    SCORED_ROWS,
    beside_cache_bytes,
    exchanged_bytes,
    expert_workspace_bytes,
    layer_bytes,
    mask_bytes,
    staying_bytes,
    unpacked_bytes,
    workspace_bytes,
)
from moesched.models.host_buffers import (
    attention_rows_bytes,
    in_pages,
    kv_pieces_bytes,
    routed_prompt_bytes,
    routed_rows_bytes,
)
from moesched.models.kv_blocks import KV_BLOCK_TOKENS, cached_tokens
from moesched.models.operations import Operations
from moesched.models.replayed import SERVED_MEMORIES, graph_bytes, kept_bytes, shared_bytes
from moesched.requests.batch import Batch
from moesched.requests.chunks import Chunk
from moesched.steps.read_only import ReadOnly


class BatchBytes(ReadOnly):
    """Sizes in bytes of what one batch needs on one model, without weights and KV caches.

    Args:
        batch: the requests and their division into micro-batches.
        chunks: the prompt tokens of each micro-batch of prefill, by the micro-batch's number. Where long prompts are
            cut, prefill has more micro-batches than decode.
        operations: gives the bytes of the model's data, such as those of a hidden state.
        on_gpu: whether the accelerator is a GPU with a memory of its own.

    Attributes:
        staying: activations that are kept from layer to layer, of all micro-batches.
        workspace: workspace of the kernels, for the largest micro-batch.
        unpacked: workspace into which a GPU unpacks rows of weights that are stored as codes and scales.
        in_decode: activations that are needed only within a layer, of all micro-batches in decode.
        host_workspace: workspace of experts that run on the host.
        hidden: hidden states of the largest micro-batch.
        most_tokens: number of tokens (not bytes) in the largest step of a micro-batch.
        kv_pieces: buffers through which new keys and values come to the host's KV cache.
    """

    def __init__(
        self, batch: Batch, chunks: Mapping[int, Chunk], operations: Operations, *, on_gpu: bool
    ) -> None:
        self._batch = batch
        self._operations = operations
        self._cut = {chunk.micro_batch for chunk in chunks.values() if chunk.before >= 0}
        chunked = len(chunks) > len(batch.micro_batches)
        self._prefill = prefill = [sum(chunk.tokens) for chunk in chunks.values()]
        self._decode_rows = list(map(batch.sequences, batch.micro_batches))
        rows = prefill if chunked else list(map(max, prefill, self._decode_rows))
        self._largest_first = sorted(rows, reverse=True)
        most = self._largest_first[0]
        stay = [*rows, *self._decode_rows] if chunked else rows
        self.staying = sum(staying_bytes(operations, tokens) for tokens in stay)
        scored = min(most, SCORED_ROWS) if batch.served else 0
        self.workspace = workspace_bytes(operations, most, max(scored, *self._decode_rows), on_gpu=on_gpu)
        cut = chunked or any(any(chunk.starts) for chunk in chunks.values())
        if cut:
            self.workspace += mask_bytes(most, max(batch.longest, *batch.prompts))
        if cut or batch.served:
            self.workspace += max(
                beside_cache_bytes(
                    operations, chunk.starts, chunk.tokens, self._scattered_tokens(chunk, on_gpu=on_gpu)
                )
                for chunk in chunks.values()
            )
        self.unpacked = unpacked_bytes(operations)
        self.in_decode = sum(layer_bytes(operations, rows) for rows in self._decode_rows)
        self.host_workspace = expert_workspace_bytes(operations, most)
        self.hidden = most * operations.hidden_bytes
        self.most_tokens = max(*prefill, *self._decode_rows)
        self.kv_pieces = in_pages(kv_pieces_bytes(operations, self.most_tokens))
        self._seal()

    def _scattered_tokens(self, chunk: Chunk, *, on_gpu: bool) -> int:
        """Return the largest number of tokens whose keys and values a kernel may have to gather for a chunk's requests.

        They are gathered if their cache blocks do not follow each other in memory. The number is 0 without continuous
        batching. On a CPU it counts prompts only, since decode reads the blocks in place.
        """
        if not self._batch.served:
            return 0
        if on_gpu:
            return self._batch.tokens_at_end(self._batch.micro_batches[chunk.micro_batch])
        return sum(chunk.starts) + sum(chunk.tokens) + KV_BLOCK_TOKENS * len(chunk.tokens)

    def in_prefill(self, in_flight: int) -> int:
        """Return the bytes of activations within a layer, in prefill, of the `in_flight` largest micro-batches."""
        return sum(layer_bytes(self._operations, tokens) for tokens in self._largest_first[:in_flight])

    def host_rows(self, attended: Iterable[int], *, routed: bool) -> int:
        """Return the bytes of the host's buffers for rows that go to or come from an accelerator in decode.

        Each micro-batch has a buffer of its own.

        Args:
            attended: numbers of the micro-batches whose attention the host may compute, since it has their KV cache.
            routed: whether experts run on the host.
        """
        rows, operations = self._decode_rows, self._operations
        of_attention = Counter(rows[number] for number in attended)
        of_experts = Counter(rows if routed else ())
        return in_pages(
            sum(count * attention_rows_bytes(operations, each) for each, count in of_attention.items())
            + sum(count * routed_rows_bytes(operations, each) for each, count in of_experts.items())
        )

    def host_prompt_rows(self, in_flight: int) -> int:
        """Return the bytes of the host's buffers for prefill's rows (tokens) whose experts run on the host.

        in_flight: number of micro-batches that are within a layer at once; the largest ones are counted.
        """
        return sum(routed_prompt_bytes(self._operations, rows) for rows in self._largest_first[:in_flight])

    @property
    def graphs(self) -> int:
        """Bytes of the graphs that a GPU captures from decode steps."""
        decode = self._decode_rows
        steps = (
            SERVED_MEMORIES * len(decode) if self._batch.served else sum(each <= KEPT_ROWS for each in decode)
        )
        return graph_bytes(self._operations.config.layers, steps)

    @property
    def _kept(self) -> list[int]:
        """Number of rows of each buffer in which a GPU keeps a micro-batch's results from step to step."""
        if self._batch.served:
            return [min(KEPT_ROWS, rows) for rows in self._largest_first] * SERVED_MEMORIES
        return [rows for rows in (*self._prefill, *self._decode_rows) if rows <= KEPT_ROWS]

    def replayed(self, *, loads: bool) -> int:
        """Return the bytes that CUDA graphs use at fixed addresses: results, scratch, tables of the weights' addresses.

        loads: whether keys and values are loaded from the host.
        """
        operations, batch = self._operations, self._batch
        ends = list(map(batch.unshared_at_end, batch.micro_batches))
        blocks = max(map(sum, ends)) // KV_BLOCK_TOKENS
        kept, decode, longest = self._kept, max(self._decode_rows), max(map(max, ends)) // batch.beams
        if batch.served:
            shared = shared_bytes(operations, kept, SERVED_MEMORIES * decode, longest)
        else:
            shared = shared_bytes(operations, {*kept}, decode, longest)
        return shared + sum(kept_bytes(operations, rows, blocks, loads=loads) for rows in kept)

    def exchanged(self, in_flight: int) -> int:
        """Return the bytes of the buffers for rows that nodes exchange.

        in_flight: number of prefill micro-batches that are within a layer at once; the largest ones are counted.
        """
        rows = max(sum(self._largest_first[:in_flight]), sum(self._decode_rows))
        return rows * exchanged_bytes(self._operations)

    def device_kv(self, micro_batches: Iterable[int]) -> int:
        """Return the bytes that one layer's keys and values of prompts in chunks take on the accelerator.

        They are needed if the KV cache is on the host. All tokens of a cut prompt count, even where a layer has a
        sliding window. The next layer reuses the memory.

        micro_batches: numbers of the micro-batches to count; those whose prompts are not cut need no bytes.
        """
        prompts = [
            cached_tokens(self._batch.prompts[request])
            for number in micro_batches
            if number in self._cut
            for request in self._batch.micro_batches[number]
        ]
        kinds = self._operations.kinds.values()
        return max(sum(prompts) * kind.kv_bytes + len(prompts) * kind.state_bytes for kind in kinds)

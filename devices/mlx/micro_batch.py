"""The arrays of one micro-batch between its kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moesched.requests.chunks import Chunk

from .expert_rows import ExpertRows
from .kernels import Array
from .kv_cache import KVStep


class MlxBatch:
    """A micro-batch of decoding, or a chunk of prefill.

    Attributes:
        requests: the requests.
        new: each one's tokens for the next step: its prompt, or a chunk of that, then the token sampled last.
        whole: itself, or for a chunk the micro-batch that it is part of, which decodes what is sampled.
        ends: indices of the requests that tokens are sampled for.
        rows: rows of the experts, from `route` to `combine`.
    """

    def __init__(self, requests: Sequence[int], new: Sequence[Sequence[int]]) -> None:
        self.requests = tuple(requests)
        self.new = [list(tokens) for tokens in new]
        self.whole = self
        self.ends = list(range(len(self.requests)))
        self.step: KVStep
        self.angles: tuple[Array, Array]
        self.hidden_TD: Array
        self.qkv: tuple[Array, Array, Array]
        self.attended_TX: Array
        self.rows: ExpertRows


def batches_of(
    micro_batches: Sequence[Sequence[int]], chunks: Mapping[int, Chunk], prompts: Sequence[Sequence[int]]
) -> list[MlxBatch]:
    """The micro-batches of decoding, then the chunks of prefill, where prompts are cut."""
    wholes = [MlxBatch(requests, [prompts[request] for request in requests]) for requests in micro_batches]
    if len(chunks) == len(wholes):
        return wholes
    return wholes + [_chunk(chunk, wholes, prompts) for chunk in chunks.values()]


def _chunk(chunk: Chunk, wholes: Sequence[MlxBatch], prompts: Sequence[Sequence[int]]) -> MlxBatch:
    spans = zip(chunk.requests, chunk.starts, chunk.tokens, strict=True)
    batch = MlxBatch(
        chunk.requests, [prompts[request][start : start + tokens] for request, start, tokens in spans]
    )
    batch.whole = wholes[chunk.micro_batch]
    batch.ends = [index for index, request in enumerate(chunk.requests) if request in chunk.ends]
    return batch

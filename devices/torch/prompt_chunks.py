"""Prompts in chunks: what a micro-batch of prefill has of them, and a layer's keys and values of all chunks so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from moesched.models.config import ModelConfig
from moesched.requests.batch import cached_tokens
from moesched.requests.chunks import Chunk

from ..products.linear import Tensor
from .kernels import KVView
from .micro_batch import MicroBatchState


def chunk_states(
    chunks: Mapping[int, Chunk], wholes: Sequence[MicroBatchState], prompts: Sequence[Sequence[int]]
) -> list[MicroBatchState]:
    """The state of each chunk, in their order; `wholes` are those of the micro-batches of decoding."""
    states: dict[int, MicroBatchState] = {}
    for number, chunk in chunks.items():
        whole = wholes[chunk.micro_batch]
        spans = zip(chunk.requests, chunk.starts, chunk.tokens, strict=True)
        new = [prompts[request][start : start + tokens] for request, start, tokens in spans]
        state = states[number] = MicroBatchState(chunk.requests, new, whole.beams)
        state.whole, state.before = whole, states.get(chunk.before)
        state.cache = whole.cache
        state.ends = [place for place, request in enumerate(chunk.requests) if request in chunk.ends]
    return list(states.values())


class DeviceKV:
    """Keys and values of one layer at a time, of a micro-batch's prompts, while the KV cache is elsewhere.

    Each sequence begins with a block of its own, as in the cache.
    """

    def __init__(
        self, config: ModelConfig, lengths: Mapping[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._first: dict[int, int] = {}
        slots = 0
        for sequence, length in lengths.items():
            self._first[sequence] = slots
            slots += cached_tokens(length)
        self._slots = torch.empty((2, slots, config.kv_heads, config.head_dim), dtype=dtype, device=device)

    def extended(self, state: MicroBatchState, k_TKd: Tensor, v_TKd: Tensor) -> list[KVView]:
        """Store a chunk's keys and values; returns what its sequences have by now, in their order."""
        views = []
        start = 0
        step = state.step
        for sequence, past, new in zip(step.sequences, step.past, step.new, strict=True):
            first, stop = self._first[sequence], start + new
            for half, fresh_TKd in zip(self._slots, (k_TKd, v_TKd), strict=True):
                half[first + past : first + past + new] = fresh_TKd[start:stop]
            keys, values = (half[None, first : first + past + new] for half in self._slots)
            views.append(KVView(keys, values, new))
            start = stop
        return views

"""Memory on the accelerator for keys and values of prompts whose KV cache is on the host, kept from chunk to chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from moesched.models.config import ModelConfig
from moesched.models.kv_blocks import cached_tokens
from moesched.steps.plan import Plan

from ..kernels.attention_functions import KVView
from ..products.linear import Tensor
from ..runner.micro_batch import MicroBatchState
from .compute import Compute


class DeviceKV:
    """Keeps keys and values of one layer at a time on the accelerator, for prompts whose KV cache is on the host.

    Each sequence begins at the start of a block, as in the cache. So the results of attention have the same bits as if
    it read the cache itself.

    Args:
        lengths: number of tokens of each prompt, by the number of its sequence.
    """

    def __init__(
        self, config: ModelConfig, lengths: Mapping[int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._first: dict[int, int] = {}
        slots = 0
        for sequence, length in lengths.items():
            self._first[sequence] = slots
            slots += cached_tokens(length)
        size = 2, slots, config.attention.kv_heads, config.attention.head_dim
        self._slots = torch.empty(size, dtype=dtype, device=device)

    def extended(self, state: MicroBatchState, k_TKd: Tensor, v_TKd: Tensor) -> list[KVView]:
        """Store the keys and values of a chunk of prompts.

        Args:
            state: the chunk's state, with its sequences and their numbers of tokens.
            k_TKd, v_TKd: the chunk's keys and values.

        Returns:
            for each sequence a view of the keys and values of all its tokens, in earlier chunks and in this one.
        """
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


def device_kv_of(plan: Plan, states: Sequence[MicroBatchState], compute: Compute) -> dict[int, DeviceKV]:
    """Make the memory that keeps keys and values from chunk to chunk, for prompts whose KV cache is on the host.

    Each micro-batch whose prompts are in several chunks has one such memory, which its chunks share.

    Args:
        states: the states of whole micro-batches, by number.

    Returns:
        the memory of each chunk, by the chunk's number.
    """
    of_wholes: dict[int, DeviceKV] = {}
    of_chunks: dict[int, DeviceKV] = {}
    for number, chunk in plan.chunks.items():
        if chunk.before < 0 and not chunk.last and "host" in plan.kv.roles[chunk.micro_batch]:
            whole = states[chunk.micro_batch]
            lengths = {
                sequence: plan.batch.prompts[request]
                for request, sequence in zip(whole.requests, whole.sequences, strict=True)
            }
            of_wholes[chunk.micro_batch] = DeviceKV(
                plan.layout.config, lengths, compute.dtype, compute.accelerator
            )
        if chunk.micro_batch in of_wholes:
            of_chunks[number] = of_wholes[chunk.micro_batch]
    return of_chunks

"""The states of a batch's micro-batches, with room in KV caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moesched.requests.batch import KV_BLOCK_TOKENS
from moesched.steps.plan import Plan
from moesched.steps.roles import KV_ROLES

from .compute import Compute
from .copies import HOST
from .kv_cache import BlockedKV
from .micro_batch import MicroBatchState


def states_of(plan: Plan, prompts: Sequence[Sequence[int]], compute: Compute) -> list[MicroBatchState]:
    """The micro-batches of decoding, then the chunks of prefill if prompts are cut."""
    states = [
        MicroBatchState(requests, [prompts[request] for request in requests], plan.batch.beams)
        for requests in plan.batch.micro_batches
    ]
    for role in KV_ROLES if plan.nodes.attends else ():
        cached = [states[number] for number in plan.kv.held_by(role)]
        if cached:
            _open_cache(plan, cached, compute.dtype, compute.accelerator if role == "accelerator" else HOST)
    return states + _chunk_states(plan, states, prompts) if plan.batch.chunked else states


def _open_cache(
    plan: Plan, states: Sequence[MicroBatchState], dtype: torch.dtype, device: torch.device
) -> None:
    """Open one KV cache for these micro-batches, with room for all tokens of each request and its beams."""
    blocks = sum(plan.batch.tokens_at_end(state.requests) for state in states) // KV_BLOCK_TOKENS
    cache = BlockedKV(plan.layout.config, blocks, block_size=KV_BLOCK_TOKENS, dtype=dtype, device=device)
    for state in states:
        state.cache = cache
        for request, sequence in zip(state.requests, state.sequences, strict=True):
            # Beams take blocks as they grow.
            new_tokens = plan.batch.new_tokens if state.beams == 1 else 0
            cache.table.open(sequence, plan.batch.prompts[request] + new_tokens)


def _chunk_states(
    plan: Plan, wholes: Sequence[MicroBatchState], prompts: Sequence[Sequence[int]]
) -> list[MicroBatchState]:
    """The state of each chunk, in their order; `wholes` are those of the micro-batches of decoding."""
    states: dict[int, MicroBatchState] = {}
    for number, chunk in plan.chunks.items():
        whole = wholes[chunk.micro_batch]
        spans = zip(chunk.requests, chunk.starts, chunk.tokens, strict=True)
        new = [prompts[request][start : start + tokens] for request, start, tokens in spans]
        state = states[number] = MicroBatchState(chunk.requests, new, whole.beams)
        state.chunk_of, state.before = whole, states.get(chunk.before)
        if plan.nodes.attends:
            state.cache = whole.cache
        state.ends = [place for place, request in enumerate(chunk.requests) if request in chunk.ends]
    return list(states.values())

"""The states of a batch's micro-batches, with room in KV caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from moesched.requests.batch import KV_BLOCK_TOKENS
from moesched.requests.chunks import Chunk
from moesched.steps.plan import Plan
from moesched.steps.reservations import held_alike
from moesched.steps.roles import KV_ROLES

from .compute import Compute
from .copies import HOST, host_indices
from .kv_cache import BlockedKV
from .locked_memory import locked_if_possible
from .micro_batch import MicroBatchState


def states_of(plan: Plan, prompts: Sequence[Sequence[int]], compute: Compute) -> list[MicroBatchState]:
    """The micro-batches of decoding, then the chunks of prefill if prompts are cut."""
    states = [
        MicroBatchState(requests, [prompts[request] for request in requests], plan.batch.beams)
        for requests in plan.batch.micro_batches
    ]
    for role in KV_ROLES if plan.nodes.attends else ():
        device = compute.accelerator if role == "accelerator" else HOST
        for layers, numbers in held_alike(plan.kv.roles, role).items():
            _open_cache(plan, layers, [states[number] for number in numbers], compute, device)
    return states + _chunk_states(plan.chunks, states, prompts) if plan.batch.chunked else states


def _open_cache(
    plan: Plan,
    layers: Sequence[int],
    states: Sequence[MicroBatchState],
    compute: Compute,
    device: torch.device,
) -> None:
    """Open one KV cache of these layers for these micro-batches, with room for all tokens of requests and beams.

    That of the host is locked for a GPU, which then copies from it without the host; native calls write to it.
    """
    lock = device == HOST and not compute.on_cpu
    blocks = sum(plan.batch.tokens_at_end(state.requests) for state in states) // KV_BLOCK_TOKENS
    cache = BlockedKV(
        plan.layout.config,
        blocks,
        block_size=KV_BLOCK_TOKENS,
        dtype=compute.dtype,
        device=device,
        layers=layers,
        indices=compute.indices if device == compute.accelerator else host_indices,
        allocate=(
            partial(locked_if_possible, device=compute.accelerator, what="the KV cache of the host")
            if lock
            else None
        ),
        kernels=compute.kernels.threads if lock else None,
    )
    for state in states:
        state.caches += (cache,)
        for request, sequence in zip(state.requests, state.sequences, strict=True):
            # Beams take blocks as they grow.
            new_tokens = plan.batch.new_tokens if state.beams == 1 else 0
            cache.table.open(sequence, plan.batch.prompts[request] + new_tokens)


def _chunk_states(
    chunks: Mapping[int, Chunk], wholes: Sequence[MicroBatchState], prompts: Sequence[Sequence[int]]
) -> list[MicroBatchState]:
    """The state of each chunk, in their order; `wholes` are those of the micro-batches of decoding."""
    states: dict[int, MicroBatchState] = {}
    for number, chunk in chunks.items():
        whole = wholes[chunk.micro_batch]
        spans = zip(chunk.requests, chunk.starts, chunk.tokens, strict=True)
        new = [prompts[request][start : start + tokens] for request, start, tokens in spans]
        state = states[number] = MicroBatchState(chunk.requests, new, whole.beams)
        state.chunk_of, state.before = whole, states.get(chunk.before)
        state.caches = whole.caches
        state.ends = [place for place, request in enumerate(chunk.requests) if request in chunk.ends]
    return list(states.values())

"""Functions that make the states of a plan's micro-batches, each with its KV caches, for torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from moesched.models.kv_blocks import KV_BLOCK_TOKENS, kept_tokens
from moesched.steps.plan import Plan
from moesched.steps.reservations import held_alike
from moesched.steps.roles import KV_ROLES

from ..kernels.resources import host_indices
from ..runner.micro_batch import MicroBatchState, chunks_of, wholes_of
from ..runner.served import ServedState
from .compute import Compute
from .copies import HOST
from .kv_cache import BlockedKV
from .locked_memory import locked_if_possible


def states_of(plan: Plan, prompts: Sequence[Sequence[int]], compute: Compute) -> list[MicroBatchState]:
    """Make the states of a batch's micro-batches, followed by those of the chunks if prompts are cut into chunks.

    prompts: the token ids of each request's prompt, in the order of the requests.
    """
    states = wholes_of(plan.batch.micro_batches, prompts, plan.batch.beams)
    _with_caches(plan, states, compute)
    for state in states:
        for request, sequence in zip(state.requests, state.sequences, strict=True):
            # Beams take blocks as they grow.
            new_tokens = plan.batch.new_tokens if state.beams == 1 else 0
            for cache in state.caches:
                cache.open(sequence, plan.batch.prompts[request] + new_tokens)
    return states + chunks_of(plan.chunks, states, prompts) if plan.batch.chunked else states


def serving_states(plan: Plan, compute: Compute) -> list[MicroBatchState]:
    """Make a state without requests for each micro-batch of a plan, for serving requests that join and leave.

    The KV caches have room for the largest batch of the plan.
    """
    return _with_caches(plan, [ServedState() for _ in plan.micro_batches], compute)


def _with_caches(plan: Plan, states: list[MicroBatchState], compute: Compute) -> list[MicroBatchState]:
    """Make a plan's KV caches, and add them to the states of their micro-batches; returns the states."""
    for role in KV_ROLES if plan.nodes.attends else ():
        device = compute.accelerator if role == "accelerator" else HOST
        for layers, numbers in held_alike(plan.kv.roles, role).items():
            for alike in plan.layout.config.by_window(layers):
                _add_cache(plan, alike, numbers, states, compute, device)
    return states


def _add_cache(
    plan: Plan,
    layers: Sequence[int],
    numbers: Sequence[int],
    states: Sequence[MicroBatchState],
    compute: Compute,
    device: torch.device,
) -> None:
    """Make a KV cache with room for the final lengths of the requests, and add it to the states of micro-batches.

    If the accelerator is a GPU, a cache on the host is page-locked, so that the GPU copies from it directly. New keys
    and values are written to such a cache by native kernels or, if there are none, by torch.

    Args:
        layers: numbers of the cache's layers, which have the same window.
        numbers: numbers of the micro-batches that share the cache.
        states: the states of all micro-batches.
        device: torch device that the cache is on.
    """
    lock = device == HOST and not compute.on_cpu
    requests = [request for number in numbers for request in plan.batch.micro_batches[number]]
    most = plan.layout.config.layer(layers[0]).attention.most_cached
    tokens = sum(kept_tokens(each, most, plan.batch.beams) for each in plan.batch.each_at_end(requests))
    cache = BlockedKV(
        plan.layout.config,
        tokens // KV_BLOCK_TOKENS,
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
    for number in numbers:
        states[number].add_cache(cache)

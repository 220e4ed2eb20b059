"""Functions that make the states of a plan's micro-batches, each with its KV caches, for MLX."""

from __future__ import annotations

from collections.abc import Sequence

from moesched.models.kv_blocks import kept_tokens
from moesched.steps.plan import Plan

from ..runner.micro_batch import MicroBatchState, chunks_of, wholes_of
from ..runner.served import ServedState
from .kv_cache import RequestsKV
from .memory import ARRAY_DTYPES


def states_of(plan: Plan, prompts: Sequence[Sequence[int]]) -> list[MicroBatchState]:
    """Make the states of a batch's micro-batches; if prompts are cut into chunks, the chunks' states follow them.

    prompts: the token ids of each request's prompt, in the order of the requests.
    """
    batch = plan.batch
    states = wholes_of(batch.micro_batches, prompts, beams=1)
    if plan.nodes.attends:
        for cache in _caches(plan, range(len(batch.prompts))):
            for request, prompt in enumerate(batch.prompts):
                cache.open(request, prompt + batch.new_tokens)
            for state in states:
                state.add_cache(cache)
    return states + chunks_of(plan.chunks, states, prompts) if batch.chunked else states


def serving_states(plan: Plan) -> list[MicroBatchState]:
    """Make a state without requests for each micro-batch of a plan, for serving requests that join and leave.

    Each state has KV caches of its own. Opening a request may move the other requests of its micro-batch in their
    caches, so none of those may be in a step. Other micro-batches have other caches, so they may be in a step.
    """
    states: list[MicroBatchState] = []
    for requests in plan.batch.micro_batches:
        state = ServedState()
        for cache in _caches(plan, requests):
            state.add_cache(cache)
        states.append(state)
    return states


def _caches(plan: Plan, requests: Sequence[int]) -> list[RequestsKV]:
    """Make a KV cache for each length of attention window that the model's layers have, with room for the requests.

    requests: numbers of the requests.
    """
    config, dtype = plan.layout.config, ARRAY_DTYPES[plan.layout.dtype]
    caches = []
    for layers in config.by_window(range(config.layers)):
        most = config.layer(layers[0]).grouped.most_cached
        slots = sum(kept_tokens(each, most) for each in plan.batch.each_at_end(requests))
        caches.append(RequestsKV(config, layers, slots, dtype))
    return caches

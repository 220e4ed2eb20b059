"""The model that the symbolic device computes: operations on hashes ("symbols"), and the tokens that are right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from random import Random

from moesched.models.config import ModelConfig
from moesched.models.layout import WeightLayout
from moesched.steps.plan import Plan

VOCABULARY = 50_000


def symbol(*parts: int | str) -> int:
    """Return a hash of the parts in their order, as a number of 56 bits."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=7).digest())


def first_tokens(requests: Iterable[int], starts: Iterable[int] = ()) -> int:
    """Return the hash of a micro-batch's prompt tokens.

    Args:
        requests: numbers of the requests.
        starts: for a chunk of prompts, the position in each prompt at which the chunk begins.
    """
    return symbol("prompts", *requests, "from", *starts)


def embed(tokens: int) -> int:
    """Return the hash of the hidden state before the first layer, given the hash of the tokens."""
    return symbol("embed", tokens)


def project(layer: int, hidden: int, weights: Mapping[int, int]) -> int:
    """Return the hash of queries, keys and values.

    Args:
        hidden: the hash of the hidden state.
        weights: hashes of the layer's weights by expert, with -1 for all others.
    """
    return symbol("qkv", layer, hidden, weights[-1])


def positions(step: int, starts: Iterable[int] = ()) -> int:
    """Return the hash of the positions of a step's tokens in the KV cache.

    Args:
        step: number of the step.
        starts: in prefill, the position in each prompt at which the chunk begins.
    """
    return symbol("positions", step, *starts)


def append(cache: int, qkv: int, where: int) -> int:
    """Return the hash of a KV cache after an append, given the hash of the cache before.

    Args:
        qkv: the hash of the new keys and values.
        where: the hash of their positions.
    """
    return symbol("cache", cache, qkv, where)


def attend(layer: int, qkv: int, cache: int) -> int:
    """Return the hash of a layer's attention output, given the hashes of the queries and of the KV cache."""
    return symbol("attention", layer, qkv, cache)


def project_output(layer: int, attention: int, hidden: int, weights: int) -> int:
    """Return the hash of the hidden state after attention: attention's projected output, added to the residual.

    attention, hidden, weights: hashes of attention's output, of the hidden state, and of the layer's dense weights.
    """
    return symbol("output", layer, attention, hidden, weights)


def choose_experts(config: ModelConfig, hidden: int, tokens: int) -> Mapping[int, int]:
    """Choose experts at random for each token, with the hidden state as seed.

    Return the number of tokens of each chosen expert, by expert, ascending.

    Args:
        hidden: the hash of the hidden state.
        tokens: number of tokens.
    """
    return _chosen(config.routed.experts, config.routed.top_k, hidden, tokens)


@lru_cache(20_000)
def _chosen(experts: int, top_k: int, hidden: int, tokens: int) -> Mapping[int, int]:
    """Return the result of `choose_experts`; cached, since each node and `expected_tokens` ask for the same."""
    random = Random(hidden)
    counts = [0] * experts
    for _ in range(tokens):
        for chosen in random.sample(range(experts), top_k):
            counts[chosen] += 1
    return {number: tokens for number, tokens in enumerate(counts) if tokens}


def expert(layer: int, number: int, hidden: int, weights: int) -> int:
    """Return the hash of the output of the expert `number` in a layer, given the hashes of its input and weights."""
    return symbol("expert", layer, number, hidden, weights)


def joined(rows: Iterable[int]) -> int:
    """Return the hash of an expert's output, given the hashes of the output's rows.

    If all rows are equal, the result is their hash. If they differ, tasks computed them from different data, and the
    result is a hash that no right output has.
    """
    first, *others = dict.fromkeys(rows)
    return symbol("torn", first, *others) if others else first


def combine(hidden: int, outputs: Sequence[int]) -> int:
    """Return the hash of the sum of the hidden state and the experts' outputs, in their order, given their hashes."""
    return symbol("combine", hidden, *outputs)


def sample(hidden: int, requests: Iterable[int]) -> list[int]:
    """Return a token id for each request, given the hash of the hidden state."""
    return [symbol("token", hidden, request) % VOCABULARY for request in requests]


def expected_tokens(plan: Plan) -> list[list[int]]:
    """Compute, without a schedule, each request's tokens, which every schedule of a plan must produce."""
    tokens: list[list[int]] = [[] for _ in plan.batch.prompts]
    for requests in plan.batch.micro_batches:
        for fresh in _generate(plan, requests):
            for request, token in fresh.items():
                tokens[request].append(token)
    return tokens


def through_layers(
    layout: WeightLayout, hidden: int, cache: dict[int, int], where: int, tokens: int, *, alone: bool
) -> int:
    """Return the hash of the hidden state after all layers, and append to each layer's KV cache.

    Args:
        hidden: the hash of the hidden state before the first layer.
        cache: the hash of the KV cache, by layer; changed in place.
        where: the hash of the tokens' positions.
        tokens: number of tokens.
        alone: True to attend over the new keys and values only, as for whole prompts (no chunks) that join a
            micro-batch.
    """
    for i in cache:
        dense = symbol("weights", *(page.id for page in layout.dense(i)))
        qkv = project(i, hidden, {-1: dense})
        cache[i] = append(cache[i], qkv, where)
        seen = append(0, qkv, where) if alone else cache[i]
        hidden = project_output(i, attend(i, qkv, seen), hidden, dense)
        outputs = [
            expert(i, e, hidden, symbol("weights", *(page.id for page in layout.expert(i, e))))
            for e in choose_experts(layout.config, hidden, tokens)
        ]
        hidden = combine(hidden, outputs)
    return hidden


def _generate(plan: Plan, requests: tuple[int, ...]) -> Iterable[dict[int, int]]:
    layout, batch = plan.layout, plan.batch
    cache = dict.fromkeys(plan.layers, 0)
    held = first_tokens(requests)
    number = batch.micro_batches.index(requests)
    prefill = [(0, chunk) for chunk in plan.chunks.values() if chunk.micro_batch == number]
    for index, chunk in [*prefill, *((index, None) for index in range(1, batch.new_tokens))]:
        count = len(requests) if chunk is None else sum(chunk.tokens)
        starts = () if chunk is None else chunk.starts
        hidden = embed(held if chunk is None else first_tokens(chunk.requests, starts))
        where = positions(index, starts)
        hidden = through_layers(layout, hidden, cache, where, count, alone=False)
        ending = requests if chunk is None else chunk.ends
        if ending:
            sampled = sample(hidden, ending)
            held = symbol("tokens", held, *sampled)
            yield dict(zip(ending, sampled, strict=True))

"""The model on symbols: its operations, and the tokens that they give without a schedule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from random import Random

from moesched.models.config import ModelConfig
from moesched.models.layout import WeightLayout
from moesched.steps.plan import Plan

VOCABULARY = 50_000


def symbol(*parts: int | str) -> int:
    """Hash the parts, in their order, to a number."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=7).digest())


def first_tokens(requests: Iterable[int], starts: Iterable[int] = ()) -> int:
    """Return the symbol of a micro-batch's prompt tokens, or of those of a chunk, which begin at `starts`."""
    return symbol("prompts", *requests, "from", *starts)


def embed(tokens: int) -> int:
    """The symbol of the hidden state for tokens."""
    return symbol("embed", tokens)


def project(layer: int, hidden: int, weights: Mapping[int, int]) -> int:
    """The symbol of queries, keys and values for a hidden state."""
    return symbol("qkv", layer, hidden, weights[-1])


def positions(step: int, starts: Iterable[int] = ()) -> int:
    """The symbol of the positions of a step's tokens in the cache; in prefill each prompt continues at its start."""
    return symbol("positions", step, *starts)


def append(cache: int, qkv: int, where: int) -> int:
    """The symbol of a cache after keys and values were appended at positions `where`."""
    return symbol("cache", cache, qkv, where)


def attend(layer: int, qkv: int, cache: int) -> int:
    """The symbol of attention over a cache."""
    return symbol("attention", layer, qkv, cache)


def project_output(layer: int, attention: int, hidden: int, weights: int) -> int:
    """The symbol of attention's output projection with the residual."""
    return symbol("output", layer, attention, hidden, weights)


def choose_experts(config: ModelConfig, hidden: int, tokens: int) -> dict[int, int]:
    """Choose experts for a number of tokens; return each chosen one's number of tokens, by expert, ascending."""
    random = Random(hidden)
    counts = [0] * config.routed.experts
    for _ in range(tokens):
        for chosen in random.sample(range(config.routed.experts), config.routed.top_k):
            counts[chosen] += 1
    return {number: tokens for number, tokens in enumerate(counts) if tokens}


def expert(layer: int, number: int, hidden: int, weights: int) -> int:
    """The symbol of one expert's output."""
    return symbol("expert", layer, number, hidden, weights)


def joined(rows: Iterable[int]) -> int:
    """Return the symbol of an expert's output: the one that all of its rows have, or that of a torn output."""
    first, *others = dict.fromkeys(rows)
    return symbol("torn", first, *others) if others else first


def combine(hidden: int, outputs: Sequence[int]) -> int:
    """The symbol of the experts' outputs, in their order, with the residual."""
    return symbol("combine", hidden, *outputs)


def sample(hidden: int, requests: Iterable[int]) -> list[int]:
    """Return a token id for each request."""
    return [symbol("token", hidden, request) % VOCABULARY for request in requests]


def expected_tokens(plan: Plan) -> list[list[int]]:
    """Compute the tokens that every schedule of a plan must produce, by request, without a schedule."""
    tokens: list[list[int]] = [[] for _ in plan.batch.prompts]
    for requests in plan.batch.micro_batches:
        for fresh in _generate(plan, requests):
            for request, token in fresh.items():
                tokens[request].append(token)
    return tokens


def through_layers(
    layout: WeightLayout, hidden: int, cache: dict[int, int], where: int, tokens: int, *, alone: bool
) -> int:
    """Return the symbol of the hidden state after all layers, and append to each layer's cache.

    Args:
        cache: the symbol of each layer's cache; changed in place.
        where: the symbol of the tokens' positions.
        alone: whether to attend over the new keys and values only, as prompts do in a place where others decode.
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

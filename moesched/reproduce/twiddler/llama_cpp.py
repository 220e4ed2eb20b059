"""Estimates times of llama.cpp b2956, a rival of Twiddler.

llama.cpp differs from our policy `layer_split` in three ways:

* The CPU computes all operations of layers that are not on the GPU, also projections and routers. The estimates ignore
  two effects: the time of attention on the CPU, and the copies between GPU and CPU that llama.cpp avoids.
* For products of at least 32 rows, these layers' dense weights, too, are copied to the GPU (pull request 6083). A long
  prompt is computed in parts of 512 rows (n_ubatch), and the weights are copied for each part.
* Beam search (llama_beam_search) decodes one beam after the other, and in each step decodes again all tokens of a beam
  after the prefix that all beams share: the KV cache holds only that prefix, which grows when all beams agree.

In reality, the text decides when beams diverge. In the estimates, every beam continues a random beam of the previous
step (the neutral model of Wright and Fisher).
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import takewhile

from moesched.machines.cost import cost_model
from moesched.models.operations import Operations
from moesched.reproduce.twiddler.environments import Bench, PredictedSeconds
from moesched.work import Work

LEAST_ON_GPU = 32
AT_ONCE = 512
PREFIXES = (1, 2, 4, 8, 16, 31, 32, 64)
"""Numbers of tokens for which a pass is simulated; times between them are interpolated."""
SEARCHES = 32
"""Number of searches that are averaged."""


def generate(bench: Bench, prompt: int) -> PredictedSeconds:
    """Predict the seconds to the first token of a prompt, and of a decode step after it."""
    step = bench.generate("layer_split", prompt).step_seconds + _dense_on_host(bench, 1)
    return PredictedSeconds(first_token(bench, prompt), step)


def first_token(bench: Bench, prompt: int) -> float:
    """Predict the seconds to the first token of a prompt."""
    whole, rest = divmod(prompt, AT_ONCE)
    return whole * pass_seconds(bench, AT_ONCE) + (pass_seconds(bench, rest) if rest else 0.0)


def pass_seconds(bench: Bench, tokens: int) -> float:
    """Predict the seconds of one pass of several tokens of a sequence through all layers."""
    experts = bench.first_token("layer_split", tokens)
    if tokens < LEAST_ON_GPU:
        return experts + _dense_on_host(bench, tokens)
    machine = bench.machine
    link = machine.link(machine.roles.weights, machine.accelerator.memory)
    return experts + bench.dense_bytes / link.bandwidth


def search(bench: Bench, prompt: int, width: int, new_tokens: int) -> float:
    """Predict the seconds of a beam search, its prompt included.

    Args:
        prompt: number of prompt tokens.
        width: number of beams.
        new_tokens: number of tokens to generate in each beam.
    """
    passes = {length: pass_seconds(bench, length) for length in PREFIXES}
    return first_token(bench, prompt) + search_seconds(width, new_tokens, passes)


def _dense_on_host(bench: Bench, tokens: int) -> float:
    """Predict how much longer projections and routers take on the CPU than on the GPU, in seconds.

    All layers that are not on the GPU count.

    Args:
        tokens: number of tokens that pass the layers together.
    """
    operations, machine = Operations(bench.config, bench.layout.dtype), bench.machine
    cost = cost_model(machine, bench.layout.dtype)

    def seconds(processor: str) -> float:
        amounts = operations.pre_attention(tokens), operations.route(tokens)
        works = (Work("dense", processor, each.flops, each.nbytes, tokens, each.parts) for each in amounts)
        return sum(cost.work(work).seconds for work in works)

    layers = bench.config.layers - bench.environment.gpu_layers
    return layers * (seconds(machine.roles.host) - seconds(machine.roles.accelerator))


def decoded_lengths(width: int, new_tokens: int, chance: random.Random) -> Iterator[list[int]]:
    """Simulate a beam search by llama.cpp; yield a list for each step: the number of tokens of each call of the model.

    The first list is empty: the first step takes its tokens from the prompt's logits, without a call.

    Args:
        width: number of beams.
        new_tokens: number of steps.
        chance: chooses the beam that each beam continues.
    """
    beams: list[tuple[int, ...]] = [()]
    for step in range(new_tokens):
        shared = sum(1 for _ in takewhile(lambda tokens: len(set(tokens)) == 1, zip(*beams, strict=False)))
        beams = [beam[shared:] for beam in beams]
        yield [length for length in (shared, *map(len, beams)) if length]
        parents = [chance.randrange(len(beams)) for _ in range(width)]
        beams = [(*beams[parent], step * width + child) for child, parent in enumerate(parents)]


def search_seconds(width: int, new_tokens: int, seconds_of: Mapping[int, float]) -> float:
    """Return the seconds of a beam search after its prompt, averaged over several simulated searches.

    Args:
        width: number of beams.
        new_tokens: number of steps.
        seconds_of: seconds of a call by its number of tokens; times between them are interpolated.
    """
    chance = random.Random(0)
    total = 0.0
    for _ in range(SEARCHES):
        for calls in decoded_lengths(width, new_tokens, chance):
            total += sum(interpolated(seconds_of, length) for length in calls)
    return total / SEARCHES


def interpolated(seconds_of: Mapping[int, float], tokens: int) -> float:
    """Return the seconds of a call with a number of tokens, interpolated linearly between the nearest known numbers.

    Outside of the known numbers, the line through the nearest two is extended.

    Args:
        seconds_of: known seconds, by number of tokens.
    """
    known = sorted(seconds_of)
    right = min(max(1, bisect_left(known, tokens)), len(known) - 1)
    low, high = known[right - 1], known[right]
    slope = (seconds_of[high] - seconds_of[low]) / (high - low)
    return seconds_of[low] + (tokens - low) * slope

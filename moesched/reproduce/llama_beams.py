"""The beam search of llama.cpp as Twiddler met it (version b2956, llama_beam_search in llama.cpp).

It decodes one beam after the other, and in each step decodes anew what a beam has beyond the tokens that all beams share:
the KV cache holds those only, and takes in more when all beams agree on them.

How far beams have grown apart depends on the text. Here every beam goes on from any beam of the step before, all equally
likely (the neutral model of Wright and Fisher).
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from os.path import commonprefix

SEARCHES = 32
"""Over how many searches is averaged."""


def decoded_lengths(width: int, new_tokens: int, chance: random.Random) -> Iterator[list[int]]:
    """The tokens of each call of the model, step by step; the first step takes what the prompt left and has none."""
    beams: list[tuple[int, ...]] = [()]
    for step in range(new_tokens):
        shared = len(commonprefix(beams))
        beams = [beam[shared:] for beam in beams]
        yield [length for length in (shared, *map(len, beams)) if length]
        parents = [chance.randrange(len(beams)) for _ in range(width)]
        beams = [(*beams[parent], step * width + child) for child, parent in enumerate(parents)]


def search_seconds(width: int, new_tokens: int, seconds_of: Mapping[int, float], seed: int = 0) -> float:
    """What all steps of a search take after the prompt, on average.

    seconds_of: what the model takes for so many tokens at once; between these, time is interpolated.
    """
    chance = random.Random(seed)
    total = 0.0
    for _ in range(SEARCHES):
        for calls in decoded_lengths(width, new_tokens, chance):
            total += sum(interpolated(seconds_of, length) for length in calls)
    return total / SEARCHES


def interpolated(seconds_of: Mapping[int, float], tokens: int) -> float:
    """Between the nearest two; beyond the last one along the line of the last two."""
    known = sorted(seconds_of)
    right = min(max(1, bisect_left(known, tokens)), len(known) - 1)
    low, high = known[right - 1], known[right]
    slope = (seconds_of[high] - seconds_of[low]) / (high - low)
    return seconds_of[low] + (tokens - low) * slope

"""The most requests and tokens that may run together in continuous batching, for which a plan reserves memory."""

from __future__ import annotations

import msgspec

from moesched.errors import BadInput
from moesched.models.kv_blocks import KV_BLOCK_TOKENS, cached_tokens
from moesched.requests.batch import Batch
from moesched.requests.batching import BatchSizes
from moesched.serving.request import Request
from moesched.system.plain_text import counted

PROMPT_TOKENS = 2048
"""Prompt tokens of a micro-batch in a step: enough for several prompts, so that requests can begin together."""


class Capacity(msgspec.Struct, frozen=True):
    """The largest numbers of requests and tokens in continuous batching.

    A place is a micro-batch whose requests change from step to step.

    Attributes:
        places: the number of places.
        sequences: the largest number of requests of a place.
        cache_tokens: number of tokens that fit in the KV cache of a place; a multiple of `KV_BLOCK_TOKENS`.
        prompt_tokens: the most prompt tokens of a place in a step if prompts are not cut; no prompt is longer.
        context: the largest number of tokens of a request, prompt and answer together.
        chunk: the most prompt tokens of a place in a step if prompts are cut over several steps; 0 if they are not cut.
    """

    places: int
    sequences: int
    cache_tokens: int
    prompt_tokens: int
    context: int
    chunk: int = 0

    def __post_init__(self) -> None:
        for what in ("places", "sequences", "prompt_tokens", "context"):
            if getattr(self, what) < 1:
                raise BadInput(f"{what} is {getattr(self, what)}: give 1 or more")
        least = 2 * KV_BLOCK_TOKENS * self.sequences
        if self.cache_tokens < least or self.cache_tokens % KV_BLOCK_TOKENS:
            raise BadInput(
                f"cache_tokens is {self.cache_tokens}: give a multiple of {KV_BLOCK_TOKENS}, and at least {least} for "
                f"{counted(self.sequences, 'request')}"
            )

    def fullest(self) -> Batch:
        """Return a batch that takes the most memory that requests may take, for policies and devices to plan with.

        Each place has `sequences` requests. Their prompts together have at least `prompt_tokens` tokens, unless that
        leaves the requests no room to generate a token. Prompts and generated tokens together fill all of
        `cache_tokens`. If prompts are cut, at most `chunk` of a place's prompt tokens pass a layer together.
        """
        blocks, more = divmod(self.cache_tokens // KV_BLOCK_TOKENS, self.sequences)
        least = KV_BLOCK_TOKENS * blocks
        prompt = min(-(-self.prompt_tokens // self.sequences), least - 1)
        prompts = [prompt + KV_BLOCK_TOKENS * (number < more) for number in range(self.sequences)]
        numbers = range(self.places * self.sequences)
        places = [
            tuple(numbers[first : first + self.sequences]) for first in range(0, len(numbers), self.sequences)
        ]
        return Batch(
            tuple(prompts * self.places),
            least - prompt,
            tuple(places),
            prefill_chunk=self.chunk or None,
            served=True,
            longest=self.longest_prompt,
        )

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt that a request may have."""
        return min(self.prompt_tokens, self.context - 1)

    def require(self, request: Request) -> None:
        """Check that a request could run if no other request ran.

        Raises:
            BadInput: the request's prompt, or prompt and answer together, are too long.
        """
        if not 1 <= request.prompt <= self.longest_prompt:
            raise BadInput(
                f"a prompt of {request.prompt} tokens: a request may have 1 to {self.longest_prompt} of them: "
                "shorten it, or raise --context"
            )
        if request.new_tokens < 1:
            raise BadInput(f"{request.new_tokens} tokens to generate: give 1 or more")
        most = min(self.context, self.cache_tokens)
        if request.most_tokens > most:
            raise BadInput(
                f"a prompt of {request.prompt} tokens and {request.new_tokens} new ones: a request may have {most} "
                "tokens in all: shorten it, or raise --context"
            )


def capacity_for(sizes: BatchSizes, context: int) -> Capacity:
    """Return the capacity for a batch of these sizes, if each request has up to `context` tokens, answer included.

    All micro-batches have room for the same number of requests, so requests that do not divide evenly are left out. To
    leave out fewer, there may be more micro-batches than in `sizes`: 16 requests in 3 micro-batches become 4
    micro-batches of 4.
    """
    each = max(cached_tokens(context), 2 * KV_BLOCK_TOKENS)
    places = _even_places(sizes.batch_size, sizes.micro_batches)
    sequences = sizes.batch_size // places
    cache_tokens = max(sizes.cache_tokens or sequences * each, each)
    prompt_tokens = max(1, context - 1, min(PROMPT_TOKENS, cache_tokens - sequences))
    return Capacity(places, sequences, cache_tokens, prompt_tokens, context)


def _even_places(requests: int, least: int) -> int:
    """Return the number of equal places, from `least` to `2 * least - 1`, that leaves out the fewest requests."""
    return min(range(least, min(2 * least, requests + 1)), key=lambda places: requests % places)

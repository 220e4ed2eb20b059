"""The state of a micro-batch: its tensors between two kernels, the tokens of its next step, and its KV caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from moesched.requests.chunks import Chunk
from moesched.requests.logprobs import WantedLogprobs
from moesched.requests.sampling import Sampling

from ..kernels.workspace import Scratch, Workspace


class MicroBatchState:
    """The tensors of one micro-batch between its kernels, and its sequences in the KV cache.

    Args:
        new: each sequence's tokens for the first step: its prompt, or a chunk of its prompt.
        beams: number of sequences of each request while decoding.

    Attributes:
        requests: numbers of the micro-batch's requests.
        sequences: numbers of the sequences in the KV cache, in the order of the requests: one for each request; once
            beam search has begun, one for each beam.
        new: each sequence's tokens for the next step.
        chunk_of: the state of the micro-batch that this chunk of prefill is part of; None if this state is no chunk.
        before: the chunk that this one continues; None for a first chunk.
        ends: indices of the sequences that a token is sampled for in this step; None for all of them.
        samplings: sampling settings of each token to sample; None if all have the batch's settings.
        logprobs: for each token to sample, the log probabilities that its request wants; None if no request wants any.
        following: for each sequence, the token of its prompt that follows the step's tokens. None at the prompt's end,
            or if log probabilities of the prompt are not wanted. Empty if no request wants log probabilities.
        memory: memory for results of the step's kernels; None if the step has more than KEPT_ROWS tokens.
        ends_alone: True if logits that are not finite end only their own request; False if they end the run.
        most_memories: largest number of memories that `take_memory` keeps, each for steps of one size in tokens. A
            memory for a further size replaces the oldest one.
        decodes: True if each sequence has one new token in the step, after its prompt.
        caches: the KV caches of the requests, each for some of the layers. A cache has `layers`, the numbers of its
            layers; `extend`, which makes room for tokens and returns a step; and `at`, which returns one layer of the
            cache, in the form that kernels take. While serving, a cache also has `open` and `close`, which begin and
            end a sequence.
        steps: for each cache, the step that its `extend` returned: the new tokens and their places.
        rows: the rows of a layer's experts, kept from the task `route` to the task `combine`. Their method
            `outputs` returns what `combine` adds up: the output rows, and each token's row indices and weights.
    """

    ends_alone = False
    most_memories = 1

    def __init__(self, requests: Sequence[int], new: Sequence[Sequence[int]], beams: int = 1) -> None:
        self.requests = tuple(requests)
        self.beams = beams
        self.sequences = tuple(request * beams for request in requests)
        self.new = [list(tokens) for tokens in new]
        self.chunk_of: MicroBatchState | None = None
        self.before: MicroBatchState | None = None
        self.ends: list[int] | None = None
        self.samplings: list[Sampling] | None = None
        self.logprobs: list[WantedLogprobs | None] | None = None
        self.following: list[int | None] = []
        self.memory: Workspace | None = None
        self._memories: dict[int, Workspace] = {}
        self.decodes = False
        self.caches: tuple[Any, ...] = ()
        self._cached: dict[int, tuple[Any, int]] = {}
        """For each layer, its part of a KV cache, and the index of this cache in `caches`."""
        self.steps: list[Any] = []
        self.angles: tuple[Any, Any]
        self.hidden_TD: Any
        self.qkv: tuple[Any, Any, Any]
        self.attended_TX: Any
        self.rows: Any

    def keep(self, requests: tuple[int, ...]) -> None:
        """Go on with only the given requests; the others have ended."""
        places = [self.requests.index(request) for request in requests]
        self.requests = requests
        self.sequences = tuple(self.sequences[place] for place in places)
        self.new = [self.new[place] for place in places]

    def begin(self, operands: Any) -> None:
        """Begin a step.

        operands: the operands of the task `embed`: numbers of the requests that go on; empty in a warm-up.
        """
        if operands and len(operands) < len(self.requests):
            self.keep(operands)

    def hand_on(self, tokens: Sequence[int]) -> None:
        """Make each sampled token the input of its sequence in the next step.

        tokens: the sampled tokens, in the order of `ends`.
        """
        if self.ends is None and self.chunk_of is None:
            self.new = [[token] for token in tokens]
            return
        whole = self.whole
        mine = self.requests if self.ends is None else [self.requests[end] for end in self.ends]
        for request, token in zip(mine, tokens, strict=True):
            whole.new[whole.requests.index(request)] = [token]

    def take_memory(self, rows: int, scratch: Scratch) -> Workspace:
        """Return memory for the results of a step with `rows` tokens, and set `memory`.

        The memory is kept for later steps with the same number of tokens, unless `rows` is above KEPT_ROWS.

        Args:
            rows: number of tokens in the step.
            scratch: memory for intermediate results.
        """
        memory = self._memories.get(rows) or Workspace(rows, scratch)
        if memory.kept and rows not in self._memories:
            if len(self._memories) == self.most_memories:
                del self._memories[next(iter(self._memories))]
            self._memories[rows] = memory
        self.memory = memory if memory.kept else None
        return memory

    def extend(self) -> None:
        """Make room in the caches for the step's new tokens, and set `steps`."""
        new = [len(tokens) for tokens in self.new]
        self.steps = [cache.extend(self.sequences, new) for cache in self.caches]

    @property
    def step(self) -> Any:
        """The step in the first KV cache: each sequence's numbers of tokens before it (`past`) and in it (`new`)."""
        return self.steps[0]

    def kernel_memory(self) -> Workspace:
        """Return memory for the results of one kernel: `memory`, or new memory in a step of many tokens."""
        return self.memory or Workspace(len(self.hidden_TD))

    def add_cache(self, cache: Any) -> None:
        """Add a KV cache that holds some of the layers."""
        self._cached |= {layer: (cache.at(layer), len(self.caches)) for layer in cache.layers}
        self.caches += (cache,)

    def cached(self, layer: int) -> tuple[Any, Any]:
        """Return one layer of the KV cache that has this layer, and the step with the new tokens' places in that cache.

        The layer is in the form that attention kernels take.
        """
        cached, number = self._cached[layer]
        return cached, self.steps[number]

    @property
    def whole(self) -> MicroBatchState:
        """The state of the whole micro-batch: `chunk_of` if this state is of a chunk, otherwise this state itself."""
        return self.chunk_of or self

    @property
    def sampled(self) -> int:
        """The number of sequences that tokens are sampled for."""
        return len(self.step.new) if self.ends is None else len(self.ends)

    @property
    def last(self) -> list[int]:
        """The index in `hidden_TD` of the last token of each sequence that a token is sampled for."""
        last = self.step.last
        return last if self.ends is None else [last[end] for end in self.ends]


def wholes_of(
    micro_batches: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], beams: int
) -> list[MicroBatchState]:
    """Make the state of each micro-batch, with whole prompts as the tokens of its first step.

    Args:
        micro_batches: for each micro-batch, the numbers of its requests.
        prompts: the token ids of each request, by its number.
        beams: number of sequences of each request while decoding.
    """
    return [
        MicroBatchState(requests, [prompts[request] for request in requests], beams)
        for requests in micro_batches
    ]


def chunks_of(
    chunks: Mapping[int, Chunk], wholes: Sequence[MicroBatchState], prompts: Sequence[Sequence[int]]
) -> list[MicroBatchState]:
    """Make the states of prefill's chunks, in order; each chunk shares the KV caches of its micro-batch.

    Args:
        chunks: the chunks by their number.
        wholes: the states of the micro-batches, by number.
        prompts: each request's tokens.
    """
    states: dict[int, MicroBatchState] = {}
    for number, chunk in chunks.items():
        whole = wholes[chunk.micro_batch]
        spans = zip(chunk.requests, chunk.starts, chunk.tokens, strict=True)
        new = [prompts[request][start : start + tokens] for request, start, tokens in spans]
        state = states[number] = MicroBatchState(chunk.requests, new, whole.beams)
        state.chunk_of, state.before = whole, states.get(chunk.before)
        for cache in whole.caches:
            state.add_cache(cache)
        state.ends = [place for place, request in enumerate(chunk.requests) if request in chunk.ends]
    return list(states.values())

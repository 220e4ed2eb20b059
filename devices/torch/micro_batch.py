"""The tensors of one micro-batch between its kernels."""

from __future__ import annotations

from collections.abc import Sequence

from ..kernels.memory import Memory
from ..products.linear import Tensor
from .expert_rows import ExpertRows
from .kv_cache import BlockedKV, CachedLayer
from .kv_step import KVStep


class MicroBatchState:
    """The tensors of one micro-batch between its kernels, and its place in the KV cache.

    Args:
        new: each sequence's tokens for the first step: its prompt, or a chunk of that.
        beams: sequences of each request while decoding.

    Attributes:
        requests: the requests, as the KV cache knows them.
        sequences: the requests' sequences in the KV cache, in order of request: one each, and later one per beam.
        new: each sequence's tokens for the next step.
        chunk_of: the micro-batch that a chunk of prefill is part of; else None.
        before: the chunk that this one continues, if any.
        ends: the places of the sequences that tokens are sampled for; None for all of them.
        memory: that of the step's kernels for results; None where its tokens are many.
        caches: the KV caches that have its requests: one of all layers, or two of some layers each.
        rows: the rows of the layer's experts, from `route` to `combine`.
    """

    def __init__(self, requests: Sequence[int], new: Sequence[Sequence[int]], beams: int = 1) -> None:
        self.requests = tuple(requests)
        self.beams = beams
        self.sequences = tuple(request * beams for request in requests)
        self.new = [list(tokens) for tokens in new]
        self.chunk_of: MicroBatchState | None = None
        self.before: MicroBatchState | None = None
        self.ends: list[int] | None = None
        self.memory: Memory | None = None
        self.caches: tuple[BlockedKV, ...] = ()
        self._steps: list[KVStep] = []
        self.angles: tuple[Tensor, Tensor]
        self.hidden_TD: Tensor
        self.qkv: tuple[Tensor, Tensor, Tensor]
        self.attended_TX: Tensor
        self.rows: ExpertRows

    def extend(self) -> None:
        """Make room in the caches for the tokens of the next step, which begins."""
        new = [len(tokens) for tokens in self.new]
        self._steps = [cache.extend(self.sequences, new) for cache in self.caches]

    @property
    def step(self) -> KVStep:
        """The sequences' tokens of this step; their blocks are those of the first cache."""
        return self._steps[0]

    @property
    def room(self) -> Memory:
        """Memory for the results of a kernel; new each time where the tokens are many."""
        return self.memory or Memory(len(self.hidden_TD))

    def cached(self, layer: int) -> CachedLayer:
        """The keys and values of a layer, and the new tokens' places among them."""
        number = 0 if len(self.caches) == 1 or layer in self.caches[0].places else 1
        return CachedLayer(self.caches[number], layer, self._steps[number])

    @property
    def whole(self) -> MicroBatchState:
        """The micro-batch that decodes what is sampled: itself, unless it is a chunk."""
        return self.chunk_of or self

    @property
    def sampled(self) -> int:
        """The number of sequences that tokens are sampled for."""
        return len(self.step.new) if self.ends is None else len(self.ends)

    @property
    def last(self) -> list[int]:
        """The last token among the T of each sequence that tokens are sampled for."""
        last = self.step.last
        return last if self.ends is None else [last[end] for end in self.ends]

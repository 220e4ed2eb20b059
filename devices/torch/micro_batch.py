"""The tensors of one micro-batch between its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moesched.requests.beams import BeamSearch

from ..products.linear import Tensor
from .kernels import Grouping
from .kv_cache import BlockedKV, KVStep


class HostRows:
    """The rows that experts on the host read, and their outputs.

    x_TD: hidden states. tokens_n: each row's token.
    """

    def __init__(self, x_TD: Tensor, tokens_n: Tensor) -> None:
        self._x_TD = x_TD
        self._tokens_n = tokens_n
        self._rows: tuple[Tensor, Tensor] | None = None

    def rows(self, *, pinned: bool) -> tuple[Tensor, Tensor]:
        """The experts' rows x_nD, and y_nD for what they make of them; the first call makes both."""
        if self._rows is None:
            x_nD = self._x_TD.index_select(0, self._tokens_n)
            self._rows = x_nD, torch.empty(x_nD.shape, dtype=x_nD.dtype, pin_memory=pinned)
        return self._rows


class MicroBatchState:
    """The tensors of one micro-batch between its kernels, and its place in the KV cache.

    Those on the host exist where the accelerator has a memory of its own.

    Attributes:
        requests: the requests, as the KV cache knows them.
        sequences: what the requests have in the KV cache, request after request: one sequence each, later one a beam.
        new: each sequence's tokens for the next step: its prompt, or a chunk of that, then the token sampled last.
        whole: itself, or for a chunk of prefill the micro-batch that it is part of, which decodes what is sampled.
        before: the chunk that this one goes on from, if any.
        ends: the places of the sequences that tokens are sampled for; None for all of them.
        searches: the beam search of each request; none without beams.
        parents: the sequence that each one of the next step goes on from, by its place among those of this step.
        cache: the KV cache that has its requests.
        starts: each expert's first row of x_nD and y_nD, and their number of rows.
        logits_SV: those of a rank of several, until all ranks' are summed.
        told: what nodes tell each other, by what it is.
    """

    def __init__(
        self,
        requests: Sequence[int],
        prompts: Sequence[Sequence[int]],
        searches: Sequence[BeamSearch],
        beams: int,
    ) -> None:
        self.requests = tuple(requests)
        self.beams = beams
        self.sequences = tuple(request * beams for request in requests)
        self.searches = searches
        self.whole = self
        self.before: MicroBatchState | None = None
        self.ends: list[int] | None = None
        self.parents: list[int] = []
        self.new = [list(prompts[request]) for request in requests]
        self.cache: BlockedKV
        self.step: KVStep
        self.angles: tuple[Tensor, Tensor]
        self.hidden_TD: Tensor
        self.qkv: tuple[Tensor, Tensor, Tensor]
        self.qkv_on_host: tuple[Tensor, Tensor, Tensor]
        self.attended_TX: Tensor
        self.attended_on_host: Tensor
        self.x_nD: Tensor
        self.y_nD: Tensor
        self.weights_Tk: Tensor
        self.grouping: Grouping
        self.starts: list[int]
        self.on_host: HostRows | None = None
        self.logits_SV: Tensor
        self.told: dict[str, Any] = {}

    @property
    def last_S(self) -> Tensor:
        """The last token among the T of each sequence that tokens are sampled for."""
        last_S = self.step.last_S
        return last_S if self.ends is None else last_S[self.ends]

    def rows_of(self, expert: int) -> range:
        """The rows of x_nD and y_nD that are an expert's."""
        return range(self.starts[expert], self.starts[expert + 1])

"""The tensors of one micro-batch between its kernels."""

from __future__ import annotations

from collections.abc import Sequence

from moesched.beams import BeamSearch

from .kv_cache import KVStep
from .torch_kernels import Grouping, Tensor


class MicroBatchState:
    """What a micro-batch's kernels leave for each other.

    Those on the host exist where the accelerator has a memory of its own.

    Attributes:
        requests: the requests, as the KV cache knows them.
        sequences: what the requests have in the KV cache, request after request: one sequence each, later one a beam.
        new: each sequence's tokens for the next step: its prompt, then the token sampled last.
        searches: the beam search of each request; none without beams.
        parents: the sequence that each one of the next step goes on from, by its place among those of this step.
        starts: each expert's first row of x_nD and y_nD, and their number of rows.
        logits_SV: those of a rank of several, until all ranks' are summed.
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
        self.parents: list[int] = []
        self.new = [list(prompts[request]) for request in requests]
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
        self.logits_SV: Tensor

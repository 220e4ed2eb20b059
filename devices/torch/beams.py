"""Beam search on torch: the searches of a batch, and the reordering of their sequences in the KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from moesched.requests.beams import BeamSearch, Standing
from moesched.tasks import Task

from ..products.team import use_cores
from ..runner.micro_batch import MicroBatchState


class BeamSearches:
    """Advances the beam searches of a batch, and reorders their sequences in the KV cache.

    Args:
        searches: the search of each request, by the request's number.
        states: the state of each micro-batch, by the micro-batch's number.
    """

    def __init__(self, searches: Mapping[int, BeamSearch], states: Sequence[MicroBatchState]) -> None:
        self._searches = searches
        self._states = states
        self._parents: dict[int, list[int]] = {}

    def advance(
        self, state: MicroBatchState, places: Sequence[int], logits_SV: npt.NDArray[np.float32]
    ) -> list[Standing]:
        """Extend the beams of some requests of a micro-batch by one token.

        Args:
            state: the state of the micro-batch; its `new`, the input tokens of the next step, is set.
            places: indices of the requests in the micro-batch.
            logits_SV: logits (beams, vocabulary) of all beams of these requests; just after prefill, each request has a
                single sequence instead of its beams.

        Returns:
            for each search the best sequence so far, its score, and whether it is final.
        """
        count = len(state.requests) * state.beams
        if len(state.new) != count:  # after prefill: one entry per prompt
            state.new = [[]] * count
        searches = [self._searches[state.requests[place]] for place in places]
        for place, search, logits in zip(places, searches, np.split(logits_SV, len(places)), strict=True):
            moves = search.advance(logits)
            self._parents[state.requests[place]] = moves.parents
            state.new[place * state.beams : (place + 1) * state.beams] = [[token] for token in moves.tokens]
        return [search.standing for search in searches]

    def reorder(self, task: Task) -> None:
        """Make each beam of a micro-batch continue the cached sequence that the last `advance` chose as its parent."""
        use_cores(1)
        state = self._states[task.micro_batch]
        before = len(state.sequences) // len(state.requests)
        parents = [
            place * before + parent
            for place, request in enumerate(state.requests)
            for parent in self._parents[request]
        ]
        children = [request * state.beams + beam for request in state.requests for beam in range(state.beams)]
        for cache in state.caches:
            cache.reorder(state.sequences, parents, children)
        state.sequences = tuple(children)

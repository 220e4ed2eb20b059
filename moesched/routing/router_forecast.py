"""Simulated router previews: the experts that the router will choose, with random mistakes."""

from __future__ import annotations

import numpy as np

from moesched.errors import BadInput
from moesched.inputs.defaults import PREVIEW_ACCURACY
from moesched.seams import Routing

_PREVIEW = 1
"""Part of the seed that makes these random numbers differ from those of a routing with the same seed."""


class RouterForecast:
    """Predicts what a `Routing` will choose; the same arguments and seed give the same prediction.

    Each expert that the router will choose is predicted with probability `accuracy` one layer ahead, and with
    `accuracy` to the power of n for n layers ahead. Otherwise another expert, which the router will not choose, is
    predicted in its place, with its tokens, as long as there is one. An expert that is missed is also missed from
    further ahead.

    Raises:
        BadInput: the accuracy is not a probability.
    """

    def __init__(
        self, routing: Routing, experts: int, accuracy: float = PREVIEW_ACCURACY, seed: int = 0
    ) -> None:
        if not 0 <= accuracy <= 1:
            raise BadInput(f"--preview-accuracy is {accuracy:g}: give 0 to 1")
        self._routing = routing
        self._experts = experts
        self._accuracy = accuracy
        self._seed = seed % 2**64

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int, ahead: int = 1) -> dict[int, int]:
        """Predict the number of tokens of each expert in `layer`, `ahead` layers before it; sorted by expert."""
        accuracy = self._accuracy**ahead
        chosen = self._routing.choose(step, layer, micro_batch, tokens)
        random = np.random.default_rng((self._seed, step, layer, micro_batch, _PREVIEW))
        others = [expert for expert in range(self._experts) if expert not in chosen]
        random.shuffle(others)
        predicted = {}
        for expert, count in chosen.items():
            mistaken = random.random() >= accuracy
            if not mistaken:
                predicted[expert] = count
            elif others:
                predicted[others.pop()] = count
        return dict(sorted(predicted.items()))

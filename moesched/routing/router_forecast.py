"""Simulated router previews: the experts that the router will choose, with random mistakes."""

from __future__ import annotations

import numpy as np

from moesched.errors import BadInput
from moesched.inputs.defaults import PREVIEW_ACCURACY
from moesched.seams import Routing

_PREVIEW = 1
"""Part of the seed that makes these random numbers differ from those of a routing with the same seed."""


class RouterForecast:
    """Predicts the experts that a `Routing` will choose; the same arguments and seed give the same prediction.

    Each chosen expert is predicted with probability `accuracy` one layer ahead, and with `accuracy` to the power of n
    for n layers ahead. Otherwise an expert that the router will not choose is predicted in its place, with the same
    number of tokens, or none if no such expert is left. An expert that is missed one layer ahead is also missed from
    further ahead.

    Args:
        experts: number of experts in a layer.
        accuracy: a probability, from 0 to 1.

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
        """Predict the number of a micro-batch's tokens for each expert of `layer`, by expert id, ascending.

        Args:
            ahead: number of layers before `layer` at which the prediction is made.
        """
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

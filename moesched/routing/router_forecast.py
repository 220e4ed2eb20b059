"""What previews of the router come to where no router runs: the experts that it will choose, but for some mistakes."""

from __future__ import annotations

import numpy as np

from moesched.errors import BadInput
from moesched.seams import Routing

PREVIEW_ACCURACY = 0.8
"""How likely an expert that the router will choose is foretold: an assumption.

The next layer's router on this layer's hidden state was seen to foretell about 80 to 90 % of Mixtral 8x7B's experts
(Eliseev and Mazur 2023, speculative loading). Other models may differ; on hardware previews are the model's own.
"""

_PREVIEW = 1
"""Tells these random numbers from those of a routing with the same seed."""


class RouterForecast:
    """Foretells a routing. The same arguments and seed give the same preview.

    Each expert that the router will choose is foretold with the probability `accuracy`. Otherwise another one is, in
    its place and with its tokens, that the router will not choose, as long as there is one.

    Raises:
        BadInput: the accuracy is no probability.
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

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        """How many of a micro-batch's tokens each expert is thought to get, in ascending order of expert."""
        chosen = self._routing.choose(step, layer, micro_batch, tokens)
        random = np.random.default_rng((self._seed, step, layer, micro_batch, _PREVIEW))
        others = [expert for expert in range(self._experts) if expert not in chosen]
        random.shuffle(others)
        foretold = {}
        for expert, count in chosen.items():
            mistaken = random.random() >= self._accuracy
            if not mistaken:
                foretold[expert] = count
            elif others:
                foretold[others.pop()] = count
        return dict(sorted(foretold.items()))

"""Interface of sources of expert choices for single tokens, and the routing of a simulated batch by such choices.

Whatever the source, a token's experts depend only on the layer, its request and its position. So batches, micro-batches
and schedules do not change them, and policies are compared on the same choices.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moesched.requests.batch import Batch
from moesched.tasks import phase_after

Integers = npt.NDArray[np.integer[Any]]


class ExpertChoices(Protocol):
    """A source of the experts that each token chooses, given only the layer, its request and its position."""

    @property
    def experts(self) -> int:
        """Number of experts in a layer."""

    def of_tokens(self, layer: int, requests_T: Integers, positions_T: Integers) -> Integers:
        """Return the ids (T, top_k) of the experts that T tokens choose in a layer, ascending in each row.

        Args:
            requests_T: the index of each token's request.
            positions_T: each token's position in its request, from 0.
        """


class BatchRouting:
    """The `Routing` of one simulated batch: it looks up the experts of each token and counts them by micro-batch.

    In decode, each beam chooses experts as if it were a request of its own.
    """

    def __init__(self, choices: ExpertChoices, batch: Batch) -> None:
        self._choices = choices
        self._requests = [np.array(requests) + batch.first_request for requests in batch.micro_batches]
        self._prompts = [
            np.array([batch.prompts[request] for request in requests]) for requests in batch.micro_batches
        ]
        self._chunks = batch.chunks()
        self._first_request = batch.first_request
        self._beams = batch.beams

    def choose(self, step: int, layer: int, micro_batch: int, tokens: int) -> dict[int, int]:
        """Return the number of the micro-batch's tokens that choose each expert of a layer, by expert id, ascending.

        Experts that no token chooses are left out. `tokens` is the number of tokens that the caller expects.

        Raises:
            ValueError: the micro-batch has a different number of tokens in that step.
        """
        if phase_after(step) == "prefill":
            chunk = self._chunks[micro_batch]
            requests_T = np.repeat(np.array(chunk.requests) + self._first_request, chunk.tokens)
            spans = zip(chunk.starts, chunk.tokens, strict=True)
            positions_T = np.concatenate([np.arange(start, start + length) for start, length in spans])
        else:
            requests, lengths = self._requests[micro_batch], self._prompts[micro_batch]
            requests_T = (requests[:, None] * self._beams + np.arange(self._beams)).ravel()
            positions_T = np.repeat(lengths + step - 1, self._beams)
        if len(requests_T) != tokens:
            raise ValueError(f"step {step} of mb{micro_batch} has {len(requests_T)} tokens, not {tokens}")
        return counted(self._choices, layer, requests_T, positions_T)


def counted(
    choices: ExpertChoices, layer: int, requests_T: Integers, positions_T: Integers
) -> dict[int, int]:
    """Count the tokens that choose each expert of a layer, by expert id, ascending, without zeros.

    Args:
        requests_T, positions_T: the request and the position of each token, as for `ExpertChoices.of_tokens`.
    """
    chosen_Tk = choices.of_tokens(layer, requests_T, positions_T)
    counts = np.bincount(chosen_Tk.ravel(), minlength=choices.experts).tolist()
    return {expert: count for expert, count in enumerate(counts) if count}

"""Routing traces: the experts of every token of a real run in every layer, and the .npz format of moesched.

The file is compressed by numpy (`numpy.load` reads it) and has these arrays:

    chosen          (tokens, layers, top_k), uint8 or uint16: expert ids, ascending; tokens in order of request and
                    position; zeros in layers without experts
    request_tokens  (requests,), int64: tokens of each request
    prompt_tokens   (requests,), int64: tokens of each prompt, all of which belong to step 0; each later token is a step
                    of its own. An unknown number, as in traces of some other tools, is written as 0
    experts         (), int64: experts in a layer
    model           (), text: name of the model
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moesched.routing.choices import Integers
from moesched.routing.profile import RoutingProfile
from moesched.system.whole_file import whole_file


class RoutingTrace(NamedTuple):
    """The expert choices of each token of a run; the fields are the arrays that the module's docstring describes."""

    model: str
    experts: int
    chosen: Integers
    request_tokens: Integers
    prompt_tokens: Integers

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, experts and top_k of the model."""
        _, layers, top_k = self.chosen.shape
        return layers, self.experts, top_k

    def profile(self, without_experts: Collection[int] = ()) -> RoutingProfile:
        """Count the tokens that chose each expert; all counts of layers without experts are 0.

        Args:
            without_experts: the layers without experts. May be empty if top_k is above 1: ids that are all zero then
                mark such layers.
        """
        layers, experts, top_k = self.shape
        counts = [
            [0] * experts
            if i in without_experts
            else np.bincount(self._choices_in(i), minlength=experts).tolist()
            for i in range(layers)
        ]
        return RoutingProfile(
            model=self.model,
            layers=layers,
            experts=experts,
            top_k=top_k,
            tokens=len(self.chosen),
            counts=tuple(map(tuple, counts)),
        )

    def _choices_in(self, layer: int) -> Integers:
        """Return the expert ids of all tokens in a layer, as a flat array (tokens * top_k,).

        The array is empty if top_k is above 1 and all ids are 0, as in a layer without experts.
        """
        chosen: Integers = self.chosen[:, layer].ravel()
        return chosen if self.chosen.shape[2] == 1 or chosen.any() else chosen[:0]


class RecordedChoices:
    """The expert choices that a trace recorded, as a source for simulations.

    The choices repeat: after the trace's last request come those of the first request, and after a request's last token
    those of its first token.
    """

    def __init__(self, trace: RoutingTrace) -> None:
        self.experts = trace.experts
        self._chosen = trace.chosen
        self._lengths = trace.request_tokens
        self._starts = np.cumsum(trace.request_tokens) - trace.request_tokens

    def of_tokens(self, layer: int, requests_T: Integers, positions_T: Integers) -> Integers:
        """Return the ids (T, top_k) of the experts that T tokens choose in a layer, ascending in each row.

        Args:
            requests_T: the index of each token's request.
            positions_T: each token's position in its request, from 0.
        """
        recorded_T = requests_T % len(self._lengths)
        rows_T = self._starts[recorded_T] + positions_T % self._lengths[recorded_T]
        experts_Tk: Integers = self._chosen[rows_T, layer]
        return experts_Tk

    @property
    def tokens(self) -> int:
        """Number of the trace's tokens."""
        return int(self._lengths.sum())

    def unused(self, lengths: Sequence[int]) -> int:
        """Return the number of the trace's tokens that a simulation does not use.

        Args:
            lengths: number of tokens of each simulated request.
        """
        used = np.zeros_like(self._lengths)
        for request, length in enumerate(lengths):
            recorded = request % len(used)
            used[recorded] = max(used[recorded], length)
        return int(np.maximum(self._lengths - used, 0).sum())


def write_routing_trace(trace: RoutingTrace, path: Path | str) -> None:
    """Write a routing trace to a file, whose name should end in .npz.

    Raises:
        BadInput: the file cannot be written.
    """
    written = BytesIO()
    np.savez_compressed(written, **trace._asdict())
    with whole_file(Path(path), "routing trace") as file:
        file.write(written.getvalue())

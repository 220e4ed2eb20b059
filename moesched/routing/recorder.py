"""Records the expert choices of a real run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from moesched.models.config import ModelConfig
from moesched.routing.checks import id_type, routed_layers, with_all_layers
from moesched.routing.choices import Integers
from moesched.routing.trace import RoutingTrace
from moesched.seams import TokenSpan


class RoutingRecorder:
    """Records the experts of every token; layers and requests may come in any order.

    A choice here is the experts of one token in one layer.

    Args:
        progress: called after each layer's router with the number of choices so far, and with `most`; None for no call.
        most: upper bound of the number of choices.
    """

    def __init__(
        self, config: ModelConfig, progress: Callable[[int, int], object] | None = None, most: int = 0
    ) -> None:
        self._config = config
        self._progress = progress
        self._most = most
        self._id = id_type(config.routed.experts)
        self._places = {layer: place for place, layer in enumerate(routed_layers(config))}
        self._chosen: dict[int, Integers] = {}
        self._ends: dict[int, list[int]] = {}
        self._choices = 0

    def routed(self, layer: int, spans: Sequence[TokenSpan], experts_Tk: Integers) -> None:
        """Record the experts that T tokens chose in one layer.

        Args:
            spans: the requests and positions of the tokens, in the order of the rows.
            experts_Tk: expert ids (T, top_k).
        """
        start, place = 0, self._places[layer]
        for request, first, tokens in spans:
            stop = start + tokens
            self._array(request, first + tokens)[first : first + tokens, place] = experts_Tk[start:stop]
            self._ends[request][place] = max(self._ends[request][place], first + tokens)
            start = stop
        self._choices += len(experts_Tk)
        if self._progress is not None:
            self._progress(self._choices, self._most)

    def trace(self, lengths: Sequence[int], prompt_tokens: Sequence[int]) -> RoutingTrace:
        """Make a trace of the recorded choices.

        After an interruption, some tokens may lack choices in some layers. A request's trace ends before its first such
        token; a request without any complete token is omitted.

        Args:
            lengths: the largest number of tokens to keep, by request.
            prompt_tokens: number of prompt tokens, by request.
        """
        kept = {
            request: min(lengths[request], *ends)
            for request, ends in sorted(self._ends.items())
            if min(ends) > 0
        }
        pieces = [self._chosen[request][:tokens] for request, tokens in kept.items()]
        empty_Tlk = np.empty((0, len(self._places), self._config.routed.top_k), self._id)
        return RoutingTrace(
            self._config.name,
            self._config.routed.experts,
            with_all_layers(np.concatenate([empty_Tlk, *pieces]), self._config),
            np.array(list(kept.values()), dtype=np.int64),
            np.array([min(prompt_tokens[request], tokens) for request, tokens in kept.items()], np.int64),
        )

    def _array(self, request: int, tokens: int) -> Integers:
        """Return a request's expert ids (positions, layers with experts, top_k), with room for `tokens` positions."""
        have = self._chosen.get(request)
        if have is None:
            self._ends[request] = [0] * len(self._places)
            have = np.empty((0, len(self._places), self._config.routed.top_k), self._id)
        if len(have) < tokens:
            grown = np.empty((max(tokens, 2 * len(have)), *have.shape[1:]), self._id)
            grown[: len(have)] = have
            self._chosen[request] = have = grown
        return have

"""The end of a step: logits of the last tokens, and the next tokens, by sampling or by beam search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from moesched.errors import NotFinite
from moesched.models.config import ModelConfig
from moesched.requests.beams import Standing
from moesched.requests.next_token import require_finite, sample, traced
from moesched.requests.sampling import Sampling
from moesched.tasks import Task

from ..kernels.layer_weights import Weights
from ..kernels.memory import Memory
from ..products.linear import Tensor
from .beams import BeamSearches
from .compute import Compute
from .micro_batch import MicroBatchState


class Choice(NamedTuple):
    """The way tokens are chosen from logits.

    Attributes:
        first_request: the number of requests in the batches before.
        kept: a list to which sequences and their logits (S, V) are appended; None to drop them.
    """

    sampling: Sampling
    first_request: int
    kept: list[tuple[tuple[int, ...], Tensor]] | None


class NextTokens:
    """Runs the verb that ends a step.

    Args:
        head: the last norm and the LM head.
        choice: how tokens are chosen.
        beams: the beam searches; None without beam search.
        first_bad: names the first tensor of a micro-batch's step that is not finite.
    """

    def __init__(
        self,
        config: ModelConfig,
        head: Weights,
        states: Sequence[MicroBatchState],
        compute: Compute,
        choice: Choice,
        beams: BeamSearches | None,
        first_bad: Callable[[MicroBatchState], str],
    ) -> None:
        self._config = config
        self._head = head
        self._states = states
        self._kernels = compute.kernels
        self._choice = choice
        self._beams = beams
        self._is_greedy = beams is None and choice.kept is None and choice.sampling.temperature == 0
        self._first_bad = first_bad
        self._dtype = str(compute.dtype).removeprefix("torch.")

    def logits(self, state: MicroBatchState) -> Tensor:
        """The logits (S, V), float32, of the last tokens."""
        last = state.last
        logits_SV: Tensor = self._kernels.bound("logits", self._head, Memory(len(last)))(
            state.hidden_TD, last
        )
        return logits_SV

    @torch.inference_mode()
    def draw(self, task: Task, logits_SV: Tensor) -> list[int] | list[Standing]:
        """The next token of each sequence, or the standing of each request's beam search.

        Raises:
            NotFinite: a logit is not finite; the message names the step and the first tensor that was bad.
        """
        state = self._states[task.micro_batch]
        try:
            return self._draw(state, logits_SV)
        except NotFinite as error:
            raise traced(error, task.step, self._first_bad(state), self._dtype) from error

    def _draw(self, state: MicroBatchState, logits_SV: Tensor) -> list[int] | list[Standing]:
        logits_SV = logits_SV.cpu()
        ends = range(len(state.sequences)) if state.ends is None else state.ends
        if self._choice.kept is not None:
            self._choice.kept.append((tuple(state.sequences[end] for end in ends), logits_SV))
        positions = [state.step.past[end] + state.step.new[end] for end in ends]
        mine = state.requests if state.ends is None else [state.requests[end] for end in ends]
        rows = len(positions) // len(mine)
        requests = [self._choice.first_request + request for request in mine for _ in range(rows)]
        whole = state.whole
        places = [whole.requests.index(request) for request in mine]
        if self._beams:
            require_finite(logits_SV.numpy(), requests, positions)
            return self._beams.advance(whole, places, logits_SV)
        tokens = sample(logits_SV.numpy(), self._choice.sampling, requests, positions)
        self._hand_on(state, tokens)
        return tokens

    def sample_next(self, task: Task) -> list[int] | list[Standing]:
        """Compute the logits, and `draw` the next tokens from them."""
        state = self._states[task.micro_batch]
        greedy = self._kernels.fused("greedy", self._head, self._memory(state)) if self._is_greedy else None
        if greedy is None:
            with torch.inference_mode():
                return self.draw(task, self.logits(state))
        tokens: list[int]
        logits_SV, tokens = greedy(state.hidden_TD, state.last)
        if -1 in tokens:
            return self.draw(task, logits_SV)  # raises
        self._hand_on(state, tokens)
        return tokens

    def _memory(self, state: MicroBatchState) -> Memory:
        """Memory for the logits: that of the step where a token is sampled for each of its rows."""
        own = state.memory
        return own if own and own.rows == state.sampled else Memory(state.sampled)

    def _hand_on(self, state: MicroBatchState, tokens: Sequence[int]) -> None:
        """Give each request its token for the next step."""
        if state.ends is None and state.chunk_of is None:
            state.new = [[token] for token in tokens]
            return
        whole = state.whole
        mine = state.requests if state.ends is None else [state.requests[end] for end in state.ends]
        for request, token in zip(mine, tokens, strict=True):
            whole.new[whole.requests.index(request)] = [token]

"""The end of a step: logits of the last tokens, and the next tokens, by sampling or by beam search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from moesched.errors import NotFinite
from moesched.models.config import ModelConfig
from moesched.requests.beams import Standing
from moesched.requests.sampling import Sampling, require_finite, sample, traced
from moesched.tasks import Task

from ..native.arguments import LayerWeights
from ..products.linear import Tensor, linear
from . import kernels
from .beams import BeamSearches
from .compute import Compute
from .global_weights import Head
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
        choice: how tokens are chosen.
        beams: the beam searches; None without beam search.
        first_bad: names the first tensor of a micro-batch's step that is not finite.
    """

    def __init__(
        self,
        config: ModelConfig,
        head: Head,
        states: Sequence[MicroBatchState],
        compute: Compute,
        choice: Choice,
        beams: BeamSearches | None,
        first_bad: Callable[[MicroBatchState], str],
    ) -> None:
        self._config = config
        self._head = head
        self._indices = compute.indices
        self._states = states
        self._use_cores_for = compute.use_cores_for
        self._team = compute.team
        self._products = compute.products
        self._native = compute.native
        self._native_head = LayerWeights({"final_norm": [head.norm_D], "lm_head": head.blocks})
        self._choice = choice
        self._beams = beams
        self._is_greedy = beams is None and choice.kept is None and choice.sampling.temperature == 0
        self._first_bad = first_bad
        self._dtype = str(compute.dtype).removeprefix("torch.")

    def logits(self, state: MicroBatchState) -> Tensor:
        """The logits (S, V), float32, of the last tokens; each block of the LM head on a core of its own."""
        config, head = self._config, self._head
        if self._native and self._by_native(state):
            return self._native.logits(state.hidden_TD, state.last, self._native_head)[0]
        last_SD = state.hidden_TD.index_select(0, self._indices(state.last))
        x_SD = kernels.norm(last_SD, head.norm_D, config.norm_eps, config.norm)
        if self._team is None or len(x_SD) <= self._products.most_rows:
            self._use_cores_for(len(x_SD), config.vocabulary // config.ranks * config.hidden)
            return self._products.linear(x_SD, head.blocks).float()
        parts: dict[int, Tensor] = {}
        self._team.run([partial(_multiply, x_SD, block, parts, n) for n, block in enumerate(head.blocks)])
        return torch.cat([parts[n] for n in range(len(head.blocks))], dim=-1).float()

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
        if not self._is_greedy or not self._by_native(state):
            return self._sample(task, state)
        logits_SV, tokens = self._likeliest(state)
        if -1 in tokens:
            return self.draw(task, logits_SV)  # raises
        self._hand_on(state, tokens)
        return tokens

    @torch.inference_mode()
    def _sample(self, task: Task, state: MicroBatchState) -> list[int] | list[Standing]:
        logits_SV = self.logits(state)
        if self._is_greedy and not logits_SV.is_cpu:
            tokens = kernels.likeliest(logits_SV)
            if -1 not in tokens:
                self._hand_on(state, tokens)
                return tokens
        return self.draw(task, logits_SV)

    def _by_native(self, state: MicroBatchState) -> bool:
        native = self._native
        return native is not None and native.takes_rows(state.sampled) and native.reads(self._native_head)

    def _likeliest(self, state: MicroBatchState) -> tuple[Tensor, list[int]]:
        """The logits by a native call, and the likeliest tokens."""
        assert self._native is not None
        buffers = state.buffers
        if buffers and state.hidden_TD is buffers.hidden_TD and state.sampled == buffers.tokens:
            return self._native.all_logits(buffers, self._native_head)
        return self._native.logits(state.hidden_TD, state.last, self._native_head)

    def _hand_on(self, state: MicroBatchState, tokens: Sequence[int]) -> None:
        """Give each request its token for the next step."""
        if state.ends is None and state.chunk_of is None:
            state.new = [[token] for token in tokens]
            return
        whole = state.whole
        mine = state.requests if state.ends is None else [state.requests[end] for end in state.ends]
        for request, token in zip(mine, tokens, strict=True):
            whole.new[whole.requests.index(request)] = [token]


def _multiply(x_TD: Tensor, block: Tensor, into: dict[int, Tensor], number: int) -> None:
    into[number] = linear(x_TD, [block])

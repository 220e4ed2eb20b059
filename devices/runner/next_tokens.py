"""The end of a step: logits of each sequence's last token, and the next token by sampling or beam search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from moesched.errors import NotFinite
from moesched.models.footprint import SCORED_ROWS
from moesched.requests.beams import Standing
from moesched.requests.logprobs import Logprob, ScoredToken, WantedLogprobs
from moesched.requests.next_token import NO_TOKEN, logprobs_of, require_finite, sample_finite, traced
from moesched.requests.sampling import Sampling
from moesched.tasks import Task

from ..kernels.binder import Binder
from ..kernels.kernel_weights import KernelWeights
from ..kernels.workspace import Workspace
from .library import Library
from .micro_batch import MicroBatchState

Logits = npt.NDArray[np.float32]


class Beams(Protocol):
    """The interface of the beam searches of a batch."""

    def advance(self, state: MicroBatchState, places: Sequence[int], logits_SV: Logits) -> list[Standing]:
        """Extend the beams of some requests of a micro-batch by a token; returns the new state of each search.

        Args:
            state: the state of the micro-batch.
            places: indices of these requests in the micro-batch.
            logits_SV: logits (beams, vocabulary) of all beams of these requests.
        """


class Choice(NamedTuple):
    """The settings by which a batch chooses tokens from logits.

    Attributes:
        first_request: number of requests in the earlier batches of the run.
        sampling: sampling settings of requests that have none of their own.
        keep: function that receives the ids of sequences and these sequences' logits (sequences, vocabulary), float32;
            None to drop the logits.
    """

    sampling: Sampling
    first_request: int
    keep: Callable[[tuple[int, ...], Logits], object] | None


class NextTokens:
    """Runs `sample`, the verb that ends a step of a micro-batch: computes logits and chooses the next tokens.

    Args:
        head: the weights of last norm and LM head.
        states: the micro-batches, by number.
        choice: the settings by which tokens are chosen without beam search.
        first_bad: function that names the first tensor of a micro-batch's step that is not finite; it returns None if
            all tensors are finite.
        beams: the beam searches; None without beam search.
    """

    def __init__(
        self,
        head: KernelWeights[Any],
        states: Sequence[MicroBatchState],
        kernels: Binder,
        library: Library,
        choice: Choice,
        first_bad: Callable[[MicroBatchState], str | None],
        beams: Beams | None = None,
    ) -> None:
        self._head = head
        self._states = states
        self._kernels = kernels
        self._library = library
        self._choice = choice
        self._beams = beams
        self._keeps_logits = choice.keep is not None
        self._first_bad = first_bad

    def logits(self, state: MicroBatchState) -> Any:
        """Compute logits for the next token of each sequence that a token is sampled for.

        The result is a float32 tensor (sequences, vocabulary).
        """
        last = state.last
        return self._kernels.bound("logits", self._head, Workspace(len(last)))(state.hidden_TD, last)

    def draw(self, task: Task, logits_SV: Any) -> list[int] | list[Standing]:
        """Choose each sequence's next token; returns the tokens, or in beam search each search's new `Standing`.

        While serving, a request whose logits are not finite gets NO_TOKEN (-1).

        logits_SV: the logits (sequences, vocabulary) of the micro-batch.

        Raises:
            NotFinite: a logit is not finite, and the run is not serving; the message names the step and the first
                tensor that was not finite.
        """
        state = self._states[task.micro_batch]
        with self._library.computing():
            self._library.settle(task.micro_batch, logits_SV)
            try:
                return self._draw(state, self._library.on_host(logits_SV))
            except NotFinite as error:
                raise traced(error, task.when, self._first_bad(state), self._kernels.dtype) from error

    def _draw(self, state: MicroBatchState, logits_SV: Logits) -> list[int] | list[Standing]:
        ends = range(len(state.sequences)) if state.ends is None else state.ends
        if self._choice.keep is not None:
            self._choice.keep(tuple(state.sequences[end] for end in ends), logits_SV)
        positions = [state.step.past[end] + state.step.new[end] for end in ends]
        mine = state.requests if state.ends is None else [state.requests[end] for end in ends]
        rows = len(positions) // len(mine)
        requests = [self._choice.first_request + request for request in mine for _ in range(rows)]
        if not state.ends_alone:
            require_finite(logits_SV, requests, positions)
        if self._beams:
            whole = state.whole
            return self._beams.advance(whole, [whole.requests.index(each) for each in mine], logits_SV)
        sampling = state.samplings or self._choice.sampling
        drawn_as = [0] * len(mine) if state.samplings else None
        tokens = sample_finite(logits_SV, sampling, requests, positions, drawn_as)
        state.hand_on(tokens)
        return tokens if state.logprobs is None else self._scored(state, state.logprobs, tokens, logits_SV)

    def _scored(
        self,
        state: MicroBatchState,
        wanted: Sequence[WantedLogprobs | None],
        tokens: Sequence[int],
        logits_SV: Logits,
    ) -> list[int]:
        """Attach log probabilities to the tokens whose requests want them; returns all tokens.

        Args:
            wanted: for each token, the log probabilities that its request wants; None for none.
            tokens: the sampled tokens.
            logits_SV: the logits (sequences, vocabulary) that the tokens were sampled from.
        """
        ends = range(len(tokens)) if state.ends is None else state.ends
        scored = []
        for end, wants, token, logits_V in zip(ends, wanted, tokens, logits_SV, strict=True):
            if wants is not None and token != NO_TOKEN:
                (logprob,) = logprobs_of(logits_V[None], [token], wants.likeliest)
                begins = wants.prompt and not state.decodes
                prompt = self._of_prompt(state, end, wants.likeliest) if begins else None
                token = ScoredToken(token, logprob, prompt)
            scored.append(token)
        return scored

    def _of_prompt(self, state: MicroBatchState, place: int, likeliest: int) -> list[Logprob | None]:
        """Compute log probabilities of those tokens of a sequence's prompt that this step's tokens predict.

        The result begins with None if the step has the prompt's first token, which nothing predicts.

        Args:
            place: index of the sequence in the micro-batch.
            likeliest: number of likeliest tokens to list beside each token.
        """
        following = state.following[place]
        ids = state.new[place] if following is None else [*state.new[place], following]
        first = sum(map(len, state.new[:place]))
        found: list[Logprob | None] = [] if state.step.past[place] else [None]
        for start in range(0, len(ids) - 1, SCORED_ROWS):
            scored = ids[start + 1 : start + 1 + SCORED_ROWS]
            rows = range(first + start, first + start + len(scored))
            logits = self._kernels.bound("logits", self._head, Workspace(len(rows)))(state.hidden_TD, rows)
            found += logprobs_of(self._library.on_host(logits), scored, likeliest)
        return found

    def sample_next(self, task: Task) -> list[int] | list[Standing]:
        """Choose the next tokens, and return what `draw` returns.

        If every request wants only its likeliest token, and the device has a kernel that finds these tokens, the kernel
        runs. Otherwise `draw` runs.
        """
        state = self._states[task.micro_batch]
        tokens = self.likeliest(state) if self._is_greedy(state) else None
        if tokens is None or (NO_TOKEN in tokens and not state.ends_alone):  # `draw` raises
            with self._library.computing():
                return self.draw(task, self.logits(state))
        state.hand_on(tokens)
        return tokens

    def _is_greedy(self, state: MicroBatchState) -> bool:
        if self._beams is not None or self._keeps_logits or state.logprobs is not None:
            return False
        return not any(each.temperature for each in state.samplings or [self._choice.sampling])

    def likeliest(self, state: MicroBatchState) -> list[int] | None:
        """Return the likeliest next token of each sequence, NO_TOKEN (-1) where logits are not finite.

        The result is None if there is no kernel for the operation greedy, which finds these tokens.
        """
        memory, rows = self._last_rows(state)
        greedy = self._kernels.fused("greedy", self._head, memory)
        if greedy is None:
            return None
        tokens: list[int]
        _, tokens = greedy(state.hidden_TD, rows)  # other micro-batches may have the logits' memory by now
        return tokens

    def _last_rows(self, state: MicroBatchState) -> tuple[Workspace, Sequence[int]]:
        """Return memory for the logits, and the indices of the rows of hidden states to sample from.

        The memory is the step's memory for results if the step samples from all of its rows, otherwise new memory.
        """
        memory, sampled = state.memory, state.sampled
        if memory is not None and memory.rows == sampled:
            return memory, range(sampled)
        return Workspace(sampled), state.last

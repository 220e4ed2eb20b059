"""The end of a step on MLX: logits of the last tokens, and the next tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from moesched.errors import NotFinite
from moesched.models.config import ModelConfig
from moesched.requests.next_token import sample, traced
from moesched.requests.sampling import Sampling
from moesched.tasks import Task

from . import kernels
from .evaluations import Evaluations
from .kernels import Array
from .micro_batch import MlxBatch


class Head(NamedTuple):
    """The LM head's transpose (D, V), and the norm before it."""

    norm_D: Array
    matrix_DV: Array


Logits = list[tuple[tuple[int, ...], npt.NDArray[np.float32]]]
"""Logits (S, V) of micro-batches, with their requests."""


class MlxNextTokens:
    """Samples the next tokens.

    Args:
        first_request: number of requests in the batches before.
        evaluations: evaluates the logits.
        logits: stores the logits of every step; None to drop them.
        first_bad: names the first weight that is not finite.
    """

    def __init__(
        self,
        config: ModelConfig,
        batches: Sequence[MlxBatch],
        head: Head,
        sampling: Sampling,
        first_request: int,
        logits: Logits | None,
        first_bad: Callable[[], str],
        *,
        evaluations: Evaluations,
    ) -> None:
        self._config = config
        self._batches = batches
        self._head = head
        self._sampling = sampling
        self._first_request = first_request
        self._kept_logits = logits
        self._first_bad = first_bad
        self._evaluations = evaluations

    def sample(self, task: Task) -> list[int]:
        """The next token of each request whose prompt has ended.

        Raises:
            NotFinite: the logits are not finite; the message names the step and the first such weight.
        """
        batch = self._batches[task.micro_batch]
        logits_SV = self._evaluations.on_host(task.micro_batch, self._logits(batch))
        requests = [batch.requests[end] for end in batch.ends]
        if self._kept_logits is not None:
            self._kept_logits.append((tuple(requests), logits_SV))
        positions = [batch.step.past[end] + batch.step.new[end] for end in batch.ends]
        of_run = [self._first_request + request for request in requests]
        try:
            tokens = sample(logits_SV, self._sampling, of_run, positions)
        except NotFinite as error:
            raise traced(error, task.step, self._first_bad()) from error
        whole = batch.whole
        for request, token in zip(requests, tokens, strict=True):
            whole.new[whole.requests.index(request)] = [token]
        return tokens

    def _logits(self, batch: MlxBatch) -> Array:
        config = self._config
        last_SD = batch.hidden_TD[mx.array([batch.step.last[end] for end in batch.ends])]
        x_SD = kernels.norm(last_SD, self._head.norm_D, config.norm_eps, config.norm)
        return kernels.linear(x_SD, [self._head.matrix_DV]).astype(mx.float32)

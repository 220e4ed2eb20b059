"""The first half of a layer on MLX: queries, keys and values, attention over the KV cache, its output projection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from moesched.models.config import ModelConfig
from moesched.tasks import Task

from . import kernels
from .evaluations import Evaluations
from .kernels import Array
from .kv_cache import RequestsKV
from .micro_batch import MlxBatch
from .weights import Weights


class MlxAttention:
    """Runs the verbs before the experts.

    Args:
        weights: the arrays that a view shows.
        kv: has room for every request.
        evaluations: evaluates results.
    """

    def __init__(
        self,
        config: ModelConfig,
        batches: Sequence[MlxBatch],
        weights: Callable[[Any], Weights],
        embedding_VD: Array,
        kv: RequestsKV,
        evaluations: Evaluations,
    ) -> None:
        self._config = config
        self._batches = batches
        self._weights = weights
        self._embedding_VD = embedding_VD
        self._kv = kv
        self._evaluations = evaluations

    def embed(self, task: Task) -> None:
        """Extend the cache by the new tokens and look up their embeddings."""
        batch = self._batches[task.micro_batch]
        batch.step = self._kv.extend(batch.requests, [len(tokens) for tokens in batch.new])
        ids_T = mx.array([token for tokens in batch.new for token in tokens])
        attention = self._config.attention
        batch.angles = kernels.rotary(batch.step.positions_T, attention.head_dim, attention.rope_theta)
        batch.hidden_TD = self._embedding_VD[ids_T]
        self._evaluations.later(task, batch.hidden_TD, *batch.angles)

    def pre_attention(self, task: Task) -> None:
        """Project the hidden states to queries, keys and values."""
        batch, dense = self._batches[task.micro_batch], self._weights(task.operands).dense
        attention = self._config.layer(task.layer).grouped
        batch.qkv = kernels.project_qkv(
            batch.hidden_TD,
            dense["attention_norm"][0],
            dense["q"] + dense["k"] + dense["v"],
            *batch.angles,
            self._config,
            attention,
            (dense["q_norm"][0], dense["k_norm"][0]) if attention.qk_norm else None,
        )
        self._evaluations.later(task, *batch.qkv)

    def attention(self, task: Task) -> None:
        """Store keys and values in the cache, and attend over it."""
        batch = self._batches[task.micro_batch]
        q_THd, k_TKd, v_TKd = batch.qkv
        del batch.qkv
        self._evaluations.close_others(task.micro_batch)
        cached = self._kv.append(task.layer, batch.step, k_TKd, v_TKd)
        views = self._kv.views(task.layer, batch.step)
        batch.attended_TX = kernels.attention(q_THd, views, self._config.layer(task.layer).grouped.window)
        self._evaluations.later(task, batch.attended_TX, *cached)

    def project_output(self, task: Task) -> None:
        """Bring attention's output back to the hidden size and add it to the hidden states, which are not evaluated."""
        batch, dense = self._batches[task.micro_batch], self._weights(task.operands).dense
        batch.hidden_TD = batch.hidden_TD + kernels.linear(batch.attended_TX, dense["o"])
        del batch.attended_TX

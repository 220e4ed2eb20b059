"""The first half of a layer on torch: queries, keys and values, attention over the KV cache, its output projection."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from moesched.models.config import ModelConfig
from moesched.tasks import Task

from ..native.arguments import LayerWeights
from ..native.attention import DTYPES, AttentionCall, NativeAttention
from ..native.buffers import StepBuffers
from ..products.linear import Tensor
from ..products.team import use_cores
from . import kernels
from .compute import Compute
from .kernels import KVView
from .micro_batch import MicroBatchState
from .weights import WeightsOf


class Attention:
    """Runs the verbs before the experts, for KV caches in the memory where the kernels run.

    Args:
        weights: the tensors of a view.
        embedding_VD: empty on a node that does not attend.
        rank: this device's rank; 0 without tensor parallelism.
    """

    def __init__(
        self,
        config: ModelConfig,
        states: Sequence[MicroBatchState],
        weights: WeightsOf,
        embedding_VD: Tensor,
        compute: Compute,
        rank: int,
    ) -> None:
        self._config = config
        self._accelerator = compute.accelerator
        self._indices = compute.indices
        self._states = states
        self._weights = weights
        self._embedding_VD = embedding_VD
        self._products = compute.products
        self._native = compute.native
        threads = compute.products.kernel
        self._native_attention: NativeAttention | None = None
        if threads and compute.dtype in DTYPES:
            self._native_attention = NativeAttention(threads)
        self._fused = compute.fused_attention
        self._use_cores_for = compute.use_cores_for
        self._rank = rank
        self._shapes: defaultdict[int, dict[int, StepBuffers]] = defaultdict(dict)
        """Buffers of each micro-batch, by the number of tokens."""

    def embed(self, task: Task) -> None:
        """Extend the cache by the new tokens and look up their embeddings."""
        state = self._states[task.micro_batch]
        state.extend()
        ids = [token for tokens in state.new for token in tokens]
        if self._native and self._native.takes_rows(len(ids)):
            buffers = self._native.buffers(len(ids), self._shapes[task.micro_batch])
            state.buffers = buffers.to_keep
            self._native.embed(buffers, ids, state.step.positions, self._embedding_VD)
            state.hidden_TD, state.angles = buffers.hidden_TD, buffers.angles
            return
        state.buffers = None
        self._embed(state, ids)

    @torch.inference_mode()
    def _embed(self, state: MicroBatchState, ids: Sequence[int]) -> None:
        use_cores(1)
        attention = self._config.attention
        positions_T = self._indices(state.step.positions)
        state.angles = kernels.rotary(positions_T, attention.head_dim, attention.rope_theta)
        state.hidden_TD = kernels.embed(self._indices(ids), self._embedding_VD)

    def pre_attention(self, task: Task) -> None:
        """Project the hidden states to queries, keys and values."""
        state, weights = self._states[task.micro_batch], self._weights(task.operands)
        native, buffers = self._native, state.buffers
        if native and (buffers or native.takes_rows(len(state.hidden_TD))) and native.reads(weights):
            buffers = buffers or native.buffers(len(state.hidden_TD))
            native.attention_inputs(buffers, state.hidden_TD, state.angles, weights)
            state.qkv = buffers.qkv
            return
        self._project_qkv(state, weights)

    @torch.inference_mode()
    def _project_qkv(self, state: MicroBatchState, weights: LayerWeights) -> None:
        config, attention = self._config, weights.layer.grouped
        self._use_cores_for(len(state.hidden_TD), config.hidden * attention.qkv_width)
        state.qkv = kernels.project_qkv(
            state.hidden_TD, weights, state.angles, config, attention, self._products.linear
        )

    def attention(self, task: Task) -> None:
        """Store keys and values in the cache, and attend over it."""
        state = self._states[task.micro_batch]
        buffers = state.buffers
        if buffers and state.qkv is buffers.qkv and task.step and state.step.one_each:
            call = buffers.attention.get(task.layer) or self._attention_call(state, buffers, task.layer)
            call(state.cached(task.layer)[1].in_blocks)
            state.attended_TX = buffers.attended_TX
        else:
            state.attended_TX = self.attend_cached(task, state, *state.qkv)
        del state.qkv

    def _attention_call(self, state: MicroBatchState, buffers: StepBuffers, layer: int) -> AttentionCall:
        assert self._native_attention is not None, "the buffers are those of its threads"
        cached, attended_TX = state.cached(layer)[0].layer(layer), buffers.attended_TX
        call = self._native_attention.prepared(*buffers.qkv, cached, attended_TX)
        buffers.attention[layer] = call
        return call

    @torch.inference_mode()
    def attend_cached(
        self, task: Task, state: MicroBatchState, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor
    ) -> Tensor:
        """Store the new tokens' keys and values in the cache, and attend over it: (T, H * d)."""
        native = self.native_for(task, state, q_THd)
        cache, step = state.cached(task.layer)
        if native:
            return native.attend(q_THd, k_TKd, v_TKd, cache.layer(task.layer), step.in_blocks)
        cache.append(task.layer, step, k_TKd, v_TKd)
        return self.attend(task, state, q_THd, cache.views(task.layer, step))

    def native_for(self, task: Task, state: MicroBatchState, q_THd: Tensor) -> NativeAttention | None:
        """Native attention if it takes this task: a decode step on the CPU. None otherwise."""
        return self._native_attention if task.step and state.step.one_each and q_THd.is_cpu else None

    def attend(self, task: Task, state: MicroBatchState, q_THd: Tensor, views: Sequence[KVView]) -> Tensor:
        """Attention of new queries over the keys and values of any views: (T, H * d)."""
        native, attention = self._native_attention, self._config.layer(task.layer).grouped
        attended_TX = native.attend_prompts(q_THd, views, attention.window) if native else None
        if attended_TX is not None:
            return attended_TX
        seen = sum(state.step.past) + len(q_THd)
        self._use_cores_for(max(state.step.new), seen * attention.cache_width)
        return kernels.attention(q_THd, views, attention.window, fused=self._fused)

    def project_output(self, task: Task) -> None:
        """Bring attention's output back to the hidden size and add the residual."""
        state, weights = self._states[task.micro_batch], self._weights(task.operands)
        width = weights.layer.attention.attended_width
        self._use_cores_for(len(state.hidden_TD), self._config.hidden * width)
        state.hidden_TD = kernels.output_projection(
            state.attended_TX, weights["o"], self.residual(state), self._products.linear
        )
        if self._accelerator.type == "cpu" or not task.step:
            del state.attended_TX  # on CUDA a decode step's belongs to the stream that copied it

    def residual(self, state: MicroBatchState) -> Tensor:
        """The residual that this rank adds to a sum over ranks: rank 0 the hidden states, the others zeros."""
        return state.hidden_TD if self._rank == 0 else torch.zeros_like(state.hidden_TD)

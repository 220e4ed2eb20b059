"""The first half of a layer on torch: queries, keys and values, attention over the KV cache, its output projection."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from moesched.tasks import Task

from ..kernels.layer_weights import Weights
from ..kernels.memory import Memory, Shapes
from ..kernels.seam import Bound
from ..products.linear import Tensor
from .compute import Compute
from .micro_batch import MicroBatchState
from .weights import WeightsOf


class Attention:
    """Runs the verbs before the experts, for KV caches in the memory where the kernels run.

    Args:
        weights: the tensors of a view.
        embedding: empty on a node that does not attend.
        rank: this device's rank; 0 without tensor parallelism.
    """

    def __init__(
        self,
        states: Sequence[MicroBatchState],
        weights: WeightsOf,
        embedding: Weights,
        compute: Compute,
        rank: int,
    ) -> None:
        self._accelerator = compute.accelerator
        self._states = states
        self._weights = weights
        self._embedding = embedding
        self._kernels = compute.kernels
        self._rank = rank
        self._shapes: defaultdict[int, Shapes] = defaultdict(Shapes)
        """Memory of each micro-batch for results."""

    def embed(self, task: Task) -> None:
        """Extend the cache by the new tokens and look up their embeddings."""
        state = self._states[task.micro_batch]
        state.extend()
        ids = [token for tokens in state.new for token in tokens]
        memory = self._shapes[task.micro_batch].of(len(ids))
        state.memory = memory if memory.kept else None
        embed = self._kernels.bound("embed", self._embedding, memory)
        state.hidden_TD, state.angles = embed(ids, state.step.positions)

    def pre_attention(self, task: Task) -> None:
        """Project the hidden states to queries, keys and values."""
        state, weights = self._states[task.micro_batch], self._weights(task.operands)
        project = self._kernels.bound("attention_inputs", weights, state.room)
        state.qkv = project(state.hidden_TD, state.angles)

    def attention(self, task: Task) -> None:
        """Store keys and values in the cache, and attend over it."""
        state = self._states[task.micro_batch]
        attend = self.attends(task, state, state.room)
        state.attended_TX = attend(state.qkv, state.cached(task.layer))
        del state.qkv

    def attends(self, task: Task, state: MicroBatchState, memory: Memory, *, on_host: bool = False) -> Bound:
        """The kernel that attends over a cache."""
        decodes = bool(task.step) and state.step.one_each
        return self._kernels.attention(task.layer, memory, decodes=decodes, on_host=on_host)

    def project_output(self, task: Task) -> None:
        """Bring attention's output back to the hidden size and add the residual."""
        state, weights = self._states[task.micro_batch], self._weights(task.operands)
        project = self._kernels.bound("output_projection", weights, state.room)
        state.hidden_TD = project(state.attended_TX, self.residual(state))
        if self._accelerator.type == "cpu" or not task.step:
            del state.attended_TX  # on CUDA a decode step's belongs to the stream that copied it

    def residual(self, state: MicroBatchState) -> Tensor:
        """The residual that this rank adds to a sum over ranks: rank 0 the hidden states, the others zeros."""
        return state.hidden_TD if self._rank == 0 else torch.zeros_like(state.hidden_TD)

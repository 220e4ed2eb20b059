"""A micro-batch's memory for the results of native calls, and the calls that write them.

Shapes in names as in `devices/torch/kernels.py`.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch

from moesched.models.config import ModelConfig

from .attention import AttentionCall
from .calls import Calls, EmbeddingCall, HeadCall
from .kernels import Tensor, numbers

KEPT_ROWS = 128
"""Rows up to which a micro-batch keeps its buffers from layer to layer: a prompt's would take too much memory."""


class Choices(NamedTuple):
    """A router's result: the experts' input; the experts of each token, int64, ascending; their weights; the logits."""

    x_TD: Tensor
    experts_Tk: Tensor
    weights_Tk: Tensor
    logits_TE: Tensor


def choices_for(config: ModelConfig, tokens: int) -> Choices:
    """Memory for a router's result; the logits are zero, as those of a single expert stay."""
    return Choices(
        torch.empty(tokens, config.hidden, dtype=torch.bfloat16),
        torch.empty(tokens, config.routed.top_k, dtype=torch.int64),
        torch.empty(tokens, config.routed.top_k),
        torch.zeros(tokens, config.routed.experts),
    )


class StepBuffers:
    """Results of a micro-batch's tasks, each allocated by the first call that writes it, and those calls.

    Few rows have the same ones in each layer and step.
    """

    def __init__(self, config: ModelConfig, tokens: int) -> None:
        self._config = config
        self.tokens = tokens
        self.hidden_TD = torch.empty(tokens, config.hidden, dtype=torch.bfloat16)
        self.counts = numbers(config.routed.experts)
        self.embedding: EmbeddingCall | None = None
        self.inputs = Calls()
        self.attention: dict[int, AttentionCall] = {}
        self.layers = Calls()
        self.heads: dict[int, HeadCall] = {}

    @property
    def to_keep(self) -> StepBuffers | None:
        """These buffers for the next layer; None where they would take much memory until then."""
        return self if self.tokens <= KEPT_ROWS else None

    @cached_property
    def projected_TD(self) -> Tensor:
        """The hidden states after the output projection."""
        return torch.empty_like(self.hidden_TD)

    @cached_property
    def angles(self) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines (T, 1, d), float32."""
        shape = self.tokens, 1, self._config.attention.head_dim
        return torch.empty(shape), torch.empty(shape)

    @cached_property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (T, H, d), keys and values (T, K, d)."""
        attention = self._config.attention
        queries, keys, values = (
            torch.empty(self.tokens, heads, attention.head_dim, dtype=torch.bfloat16)
            for heads in (attention.heads, attention.kv_heads, attention.kv_heads)
        )
        return queries, keys, values

    @cached_property
    def attended_TX(self) -> Tensor:
        """Attention's output (T, H * d)."""
        return torch.empty(self.tokens, self._config.attention.attended_width, dtype=torch.bfloat16)

    @cached_property
    def choices(self) -> Choices:
        """The router's result."""
        return choices_for(self._config, self.tokens)

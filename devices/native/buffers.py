"""A micro-batch's memory for the results of native calls, and the calls that write them.

Shapes in names as in `devices/torch/kernels.py`.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from moesched.models.config import ModelConfig

from .arguments import Inputs, Layer
from .attention import AttentionCall
from .calls import Calls, EmbeddingCall, HeadCall
from .kernels import Tensor


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
        torch.empty(tokens, config.top_k, dtype=torch.int64),
        torch.empty(tokens, config.top_k),
        torch.zeros(tokens, config.experts),
    )


class StepBuffers:
    """A micro-batch's results for one number of tokens, and the calls that write them.

    Results are overwritten in each layer and step.

    Attributes:
        angles: cosines and signed sines (T, 1, d), float32.
        counts: the rows of each expert.
    """

    def __init__(self, config: ModelConfig, tokens: int) -> None:
        bfloat16 = torch.bfloat16
        self.tokens = tokens
        self.hidden_TD = torch.empty(tokens, config.hidden, dtype=bfloat16)
        self.projected_TD = torch.empty_like(self.hidden_TD)
        self.angles = torch.empty(tokens, 1, config.head_dim), torch.empty(tokens, 1, config.head_dim)
        self.qkv = (
            torch.empty(tokens, config.heads, config.head_dim, dtype=bfloat16),
            torch.empty(tokens, config.kv_heads, config.head_dim, dtype=bfloat16),
            torch.empty(tokens, config.kv_heads, config.head_dim, dtype=bfloat16),
        )
        self.attended_TX = torch.empty(tokens, config.heads * config.head_dim, dtype=bfloat16)
        self.choices = choices_for(config, tokens)
        self.counts = (ctypes.c_int64 * config.experts)()
        self.embedding: EmbeddingCall | None = None
        self.inputs = Calls[Inputs]()
        self.attention: dict[int, AttentionCall] = {}
        self.layers = Calls[Layer]()
        self.heads: dict[int, HeadCall] = {}

"""Sizes of the tensors that pass between the operations of a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from moesched.models.config import ITEM_BYTES, ModelConfig


class ResidentShare(NamedTuple):
    """Shares of the dense weights' and of the experts' bytes that stay in the accelerator's memory, from 0 to 1."""

    dense: float = 0.0
    experts: float = 0.0


NOTHING_RESIDENT = ResidentShare()


@dataclass(frozen=True, eq=False)
class TensorSizes:
    """Widths in elements and bytes per token of one model in one dtype.

    Attributes:
        resident: shares of the weights that stay in the accelerator's memory.
    """

    config: ModelConfig
    dtype: str
    resident: ResidentShare = NOTHING_RESIDENT

    @cached_property
    def element(self) -> int:
        """Bytes per element."""
        return ITEM_BYTES[self.dtype]

    @cached_property
    def query_width(self) -> int:
        """Heads of queries times head_dim."""
        return self.config.heads * self.config.head_dim

    @cached_property
    def key_width(self) -> int:
        """Heads of keys times head_dim."""
        return self.config.kv_heads * self.config.head_dim

    @cached_property
    def expert_bytes(self) -> int:
        """Bytes of the weights of one expert."""
        return 3 * self.config.hidden * self.config.intermediate * self.element

    @property
    def hidden_bytes(self) -> int:
        """Hidden state of one token."""
        return self.config.hidden * self.element

    @property
    def qkv_bytes(self) -> int:
        """Query, key and value of one token."""
        return (self.query_width + 2 * self.key_width) * self.element

    @property
    def attention_bytes(self) -> int:
        """Attention output of one token."""
        return self.query_width * self.element

    @property
    def kv_bytes(self) -> int:
        """Key and value of one token in one layer."""
        return 2 * self.key_width * self.element

    @property
    def logits_bytes(self) -> int:
        """Logits of one token over the whole vocabulary, in float32."""
        return 4 * self.config.vocabulary

    @property
    def sum_bytes(self) -> int:
        """Sum of the experts' outputs for one token, in float32."""
        return 4 * self.config.hidden

    @property
    def row_and_choices_bytes(self) -> int:
        """Input of the experts for one token on another node: its normalised row, experts and weights, in float32."""
        return 4 * (self.config.hidden + 2 * self.config.top_k)

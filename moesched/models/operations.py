"""How much work each operation of a MoE transformer is: FLOPs, and bytes read and written.

Symbols: T tokens of a micro-batch, D hidden size, F expert size, Q and K the widths of queries and keys
(heads x head_dim), E experts, k of them per token, V vocabulary, b bytes per element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moesched.models.config import ModelConfig

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Amount(NamedTuple):
    """FLOPs, and bytes moved between a processor and its memory."""

    flops: float
    nbytes: float


class Operations:
    """The operations of one model in one dtype."""

    def __init__(self, config: ModelConfig, dtype: str) -> None:
        self.config = config
        self.element = DTYPE_BYTES[dtype]
        self.query_width = config.heads * config.head_dim
        self.key_width = config.kv_heads * config.head_dim
        self.expert_bytes = 3 * config.hidden * config.intermediate * self.element

    @property
    def hidden_bytes(self) -> int:
        """One token's hidden state."""
        return self.config.hidden * self.element

    @property
    def qkv_bytes(self) -> int:
        """One token's query, key and value."""
        return (self.query_width + 2 * self.key_width) * self.element

    @property
    def attention_bytes(self) -> int:
        """One token's attention output."""
        return self.query_width * self.element

    @property
    def kv_bytes(self) -> int:
        """One token's key and value in one layer."""
        return 2 * self.key_width * self.element

    def embed(self, tokens: int) -> Amount:
        """Rows of the embedding."""
        return Amount(0, 2 * tokens * self.hidden_bytes)

    def pre_attention(self, tokens: int) -> Amount:
        """Norm, QKV projection, rotary embedding."""
        return self._projection(tokens, self.config.hidden, self.query_width + 2 * self.key_width)

    def attention(self, lengths: Sequence[tuple[int, int]]) -> Amount:
        """Softmax attention of sequences given as (new tokens, tokens in the cache after them)."""
        window = self.config.sliding_window
        pairs = nbytes = 0
        for new, total in lengths:
            first = total - new
            if window is None or total <= window:
                pairs += new * first + new * (new + 1) // 2
            else:
                pairs += sum(min(first + n + 1, window) for n in range(new))
            seen = total if window is None else min(total, window + new)
            nbytes += seen * self.kv_bytes + new * (self.qkv_bytes + self.attention_bytes)
        return Amount(4.0 * pairs * self.query_width, nbytes)

    def output_projection(self, tokens: int) -> Amount:
        """Attention output back to the hidden size, and the residual."""
        return self._projection(tokens, self.query_width, self.config.hidden)

    def route(self, tokens: int) -> Amount:
        """Output projection, norm and router: all that comes before the experts are known."""
        router = self._projection(tokens, self.config.hidden, self.config.experts)
        return _sum(self.output_projection(tokens), router)

    def expert(self, tokens: int) -> Amount:
        """One expert's feed-forward network for `tokens` of its tokens."""
        config = self.config
        activations = tokens * (2 * config.hidden + 3 * config.intermediate) * self.element
        return Amount(6.0 * tokens * config.hidden * config.intermediate, self.expert_bytes + activations)

    def experts(self, tokens: int) -> Amount:
        """All experts of a layer for a micro-batch whose routing is not known: uniform routing in expectation."""
        config = self.config
        touched = config.experts * (1 - (1 - config.top_k / config.experts) ** tokens)
        each = self.expert(tokens * config.top_k) if touched else Amount(0, 0)
        return Amount(each.flops, each.nbytes + (touched - 1) * self.expert_bytes)

    def combine(self, tokens: int) -> Amount:
        """The weighted sum of the experts' outputs, and the residual."""
        return Amount(
            2.0 * tokens * self.config.top_k * self.config.hidden,
            (self.config.top_k + 2) * tokens * self.hidden_bytes,
        )

    def post_attention(self, tokens: int) -> Amount:
        """Output projection, router, all experts, combine."""
        return _sum(self.route(tokens), self.experts(tokens), self.combine(tokens))

    def sample(self, sequences: int) -> Amount:
        """Final norm, LM head, and the choice of a token."""
        return self._projection(sequences, self.config.hidden, self.config.vocabulary)

    def _projection(self, tokens: int, inputs: int, outputs: int) -> Amount:
        moved = (inputs * outputs + tokens * (inputs + outputs)) * self.element
        return Amount(2.0 * tokens * inputs * outputs, moved)


def _sum(*amounts: Amount) -> Amount:
    return Amount(sum(each.flops for each in amounts), sum(each.nbytes for each in amounts))

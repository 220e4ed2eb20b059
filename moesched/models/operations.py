"""How much work each operation of a MoE transformer is: FLOPs, and bytes read and written.

Symbols: T tokens of a micro-batch, D hidden size, F expert size, Q and K the widths of queries and keys
(heads x head_dim), E experts, k of them per token, V vocabulary, b bytes per element.

An amount also says which operations it consists of, so that a measured cost table can price them one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import ne
from typing import NamedTuple

from moesched.models.config import ModelConfig
from moesched.tasks import WorkPart

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Amount(NamedTuple):
    """FLOPs, bytes moved between a processor and its memory, and the operations that these are for."""

    flops: float
    nbytes: float
    parts: tuple[WorkPart, ...] = ()


class ResidentShare(NamedTuple):
    """Shares of the dense weights' and of the experts' bytes that stay in the accelerator's memory, from 0 to 1."""

    dense: float = 0.0
    experts: float = 0.0


class Operations:
    """The operations of one model in one dtype."""

    def __init__(self, config: ModelConfig, dtype: str, resident: ResidentShare = ResidentShare()) -> None:  # noqa: B008
        self.config = config
        self.resident = resident
        self.dtype = dtype
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

    @property
    def logits_bytes(self) -> int:
        """One token's logits over the whole vocabulary, in float32."""
        return 4 * self.config.vocabulary

    @property
    def sum_bytes(self) -> int:
        """One token's sum of experts, in float32."""
        return 4 * self.config.hidden

    @property
    def row_and_choices_bytes(self) -> int:
        """What a node must know of one token to run its experts: its normed row, choices and weights, in float32."""
        return 4 * (self.config.hidden + 2 * self.config.top_k)

    def embed(self, tokens: int) -> Amount:
        """Rows of the embedding."""
        moved = 2 * tokens * self.hidden_bytes
        return Amount(0, moved, (WorkPart("embed", moved),))

    def copy_kv(self, tokens: int) -> Amount:
        """Keys and values of all layers copied within the KV cache."""
        moved = 2 * tokens * self.kv_bytes * self.config.layers
        return Amount(0, moved, (WorkPart("embed", moved),))

    def pre_attention(self, tokens: int) -> Amount:
        """Norm, QKV projection, rotary embedding."""
        hidden, query, key = self.config.hidden, self.query_width, self.key_width
        flops, nbytes, _ = self._projection(tokens, hidden, query + 2 * key)
        weights = hidden * (query + 2 * key) * self.element
        return Amount(flops, nbytes, _by_place("pre_attention", weights, tokens, 1, self.resident.dense))

    def attention(self, lengths: Sequence[tuple[int, int]]) -> Amount:
        """Softmax attention of sequences given as (new tokens, tokens in the cache after them)."""
        window = self.config.sliding_window
        pairs = nbytes = stepped = steps = calls = prompts = prompt_pairs = before = 0
        for new, total in lengths:
            first = total - new
            pairs_before = pairs
            if window is None or total <= window:
                pairs += new * first + new * (new + 1) // 2
            else:
                pairs += sum(min(first + n + 1, window) for n in range(new))
            seen = total if window is None else min(total, window + new)
            nbytes += seen * self.kv_bytes + new * (self.qkv_bytes + self.attention_bytes)
            if new == 1:
                calls += total != before  # neighbours of one length are one call
                before = total
                steps += 1
                stepped += seen
            else:
                prompts += 1
                prompt_pairs += pairs - pairs_before
        parts = [WorkPart("attention", 0)]
        if calls:
            parts.append(WorkPart("attention call", 0, times=calls))
            parts.append(self._attention_steps(stepped, steps))
        if prompts:
            parts.append(
                WorkPart("attention prompt", 4.0 * prompt_pairs * self.query_width / prompts, times=prompts)
            )
        return Amount(4.0 * pairs * self.query_width, nbytes, tuple(parts))

    def attention_step(self, totals: Sequence[int]) -> Amount:
        """The same for one new token of each sequence, without a look at each: a simulation does little else here."""
        window = self.config.sliding_window
        seen = pairs = sum(totals)
        if window is not None:
            seen = sum(min(total, window + 1) for total in totals)
            pairs = sum(min(total, window) for total in totals)
        calls = 1 + sum(map(ne, totals, totals[1:]))
        cache = seen * self.kv_bytes
        moved = len(totals) * (self.qkv_bytes + self.attention_bytes)
        parts = (
            WorkPart("attention", 0),
            WorkPart("attention call", 0, times=calls),
            self._attention_steps(seen, len(totals)),
        )
        return Amount(4.0 * pairs * self.query_width, cache + moved, parts)

    def _attention_steps(self, seen: float, sequences: int) -> WorkPart:
        """Attention of one new token of each sequence over so many tokens in all: by the bytes of one KV head."""
        heads = self.config.kv_heads
        return WorkPart("step attention", seen * self.kv_bytes / sequences / heads, heads, sequences)

    def output_projection(self, tokens: int) -> Amount:
        """Attention output back to the hidden size, and the residual."""
        flops, nbytes, _ = self._projection(tokens, self.query_width, self.config.hidden)
        weights = self.query_width * self.config.hidden * self.element
        return Amount(flops, nbytes, _by_place("route", weights, tokens, 1, self.resident.dense))

    def route(self, tokens: int) -> Amount:
        """Output projection, norm and router: all that comes before the experts are known."""
        return _sum(self.output_projection(tokens), self.router(tokens))

    def router(self, tokens: int) -> Amount:
        """Norm and router."""
        return self._projection(tokens, self.config.hidden, self.config.experts)

    def preview_route(self, tokens: int) -> Amount:
        """Norm and router of another layer, by themselves; measured tables know them as a small `route`."""
        flops, nbytes, _ = self.router(tokens)
        weights = self.config.hidden * self.config.experts * self.element
        return Amount(flops, nbytes, _by_place("route", weights, tokens, 1, self.resident.dense))

    def expert(self, tokens: int) -> Amount:
        """One expert's feed-forward network for `tokens` of its tokens; its weights are as likely kept as any."""
        return self._expert(tokens, self.resident.experts)

    def resident_expert(self, tokens: int) -> Amount:
        """The same, of an expert whose weights stay."""
        return self._expert(tokens, 1.0)

    def fetched_expert(self, tokens: int) -> Amount:
        """The same, of an expert whose weights were fetched."""
        return self._expert(tokens, 0.0)

    def experts(self, tokens: int) -> Amount:
        """All experts of a layer for a micro-batch whose routing is not known: uniform routing in expectation."""
        config = self.config
        warmed = config.experts * (1 - (1 - config.top_k / config.experts) ** tokens)
        each = self.expert(tokens * config.top_k) if warmed else Amount(0, 0)
        rows = tokens * config.top_k / warmed if warmed else 0
        parts = _by_place("experts", self.expert_bytes, rows, warmed, self.resident.experts)
        return Amount(each.flops, each.nbytes + (warmed - 1) * self.expert_bytes, parts)

    def combine(self, tokens: int) -> Amount:
        """The weighted sum of the experts' outputs, and the residual."""
        moved = (self.config.top_k + 2) * tokens * self.hidden_bytes
        return Amount(
            2.0 * tokens * self.config.top_k * self.config.hidden, moved, (WorkPart("combine", moved),)
        )

    def add_residual(self, tokens: int) -> Amount:
        """The residual, where the sum of the experts' outputs is there."""
        moved = tokens * (self.sum_bytes + 2 * self.hidden_bytes)
        return Amount(float(tokens * self.config.hidden), moved, (WorkPart("combine", moved),))

    def take_rows(self, tokens: int) -> Amount:
        """The rows of each expert, put together."""
        moved = 2 * self.config.top_k * tokens * self.hidden_bytes
        return Amount(0, moved, (WorkPart("combine", moved),))

    def post_attention(self, tokens: int) -> Amount:
        """Output projection, router, all experts, combine."""
        return _sum(self.route(tokens), self.experts(tokens), self.combine(tokens))

    def after_projection(self, tokens: int) -> Amount:
        """The same without the output projection, for a rank whose projection is only a part of the sum."""
        return _sum(self.router(tokens), self.experts(tokens), self.combine(tokens))

    def all_reduce(self, nbytes: int) -> Amount:
        """What each of the ranks sends, in a ring, until all have the sum of `nbytes` that each of them has."""
        ranks = self.config.ranks
        return Amount(0, 2 * (ranks - 1) / ranks * nbytes)

    def sample(self, sequences: int) -> Amount:
        """Final norm, LM head, and the choice of a token."""
        config = self.config
        rows = config.vocabulary // config.ranks
        flops, nbytes, _ = self._projection(sequences, config.hidden, rows)
        weights = config.hidden * rows * self.element
        return Amount(flops, nbytes, _by_place("sample", weights, sequences, 1, not config.tied_embeddings))

    def choice(self, sequences: int) -> Amount:
        """The choice of a token from logits that are there."""
        return Amount(0, sequences * self.logits_bytes)

    def _expert(self, tokens: int, resident: float) -> Amount:
        config = self.config
        activations = tokens * (2 * config.hidden + 3 * config.intermediate) * self.element
        parts = _by_place("expert", self.expert_bytes, tokens, 1, resident)
        return Amount(
            6.0 * tokens * config.hidden * config.intermediate, self.expert_bytes + activations, parts
        )

    def _projection(self, tokens: int, inputs: int, outputs: int) -> Amount:
        moved = (inputs * outputs + tokens * (inputs + outputs)) * self.element
        return Amount(2.0 * tokens * inputs * outputs, moved)


def _by_place(
    operation: str, weights: int, rows: float, times: float, resident: float
) -> tuple[WorkPart, ...]:
    """An operation on `weights` bytes of weights, of which the share `resident` stays, perhaps rearranged."""
    parts = (
        WorkPart(f"resident {operation}", weights, rows, times * resident),
        WorkPart(operation, weights, rows, times * (1.0 - resident)),
    )
    return tuple(part for part in parts if part.times)


def _sum(*amounts: Amount) -> Amount:
    return Amount(
        sum(each.flops for each in amounts),
        sum(each.nbytes for each in amounts),
        tuple(part for each in amounts for part in each.parts),
    )

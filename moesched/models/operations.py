"""The work of each operation of a MoE transformer: FLOPs, and bytes read and written.

Symbols: T tokens of a micro-batch, D hidden size, F expert size, Q and K the widths of queries and keys
(heads x head_dim), E experts, k of them per token, V vocabulary, b bytes per element.

An amount also lists the operations that it consists of, so that a table of measured costs can price them one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import ne
from typing import NamedTuple

from moesched.models.tensor_sizes import TensorSizes
from moesched.tasks import WorkPart


class Amount(NamedTuple):
    """FLOPs, bytes moved between a processor and its memory, and the operations that they consist of."""

    flops: float
    nbytes: float
    parts: tuple[WorkPart, ...] = ()


class AttentionOperations(TensorSizes):
    """Attention, with the projections around it and its cache."""

    def pre_attention(self, tokens: int) -> Amount:
        """Norm, QKV projection and rotary embedding."""
        hidden, query, key = self.config.hidden, self.query_width, self.key_width
        flops, nbytes, _ = _projection(self, tokens, hidden, query + 2 * key)
        weights = hidden * (query + 2 * key) * self.element
        return Amount(flops, nbytes, _by_residency("pre_attention", weights, tokens, 1, self.resident.dense))

    def attention(self, lengths: Sequence[tuple[int, int]]) -> Amount:
        """Softmax attention of sequences given as pairs (new tokens, tokens in the cache afterwards)."""
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
                calls += total != before  # neighbours of equal length are one call
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
        """Attention of one new token per sequence; equal to `attention` and faster, since simulations call it often."""
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
        """Attention of one new token per sequence to `seen` tokens in total, by the bytes of one KV head."""
        heads = self.config.kv_heads
        return WorkPart("step attention", seen * self.kv_bytes / sequences / heads, heads, sequences)

    def copy_kv(self, tokens: int) -> Amount:
        """Copy keys and values of all layers within the KV cache."""
        moved = 2 * tokens * self.kv_bytes * self.config.layers
        return Amount(0, moved, (WorkPart("embed", moved),))

    def output_projection(self, tokens: int) -> Amount:
        """Projection of the attention output to the hidden size, and the residual."""
        flops, nbytes, _ = _projection(self, tokens, self.query_width, self.config.hidden)
        weights = self.query_width * self.config.hidden * self.element
        return Amount(flops, nbytes, _by_residency("route", weights, tokens, 1, self.resident.dense))


class ExpertOperations(TensorSizes):
    """The MoE block of a layer: router, experts, and the sum of their outputs."""

    def router(self, tokens: int) -> Amount:
        """Norm and router."""
        return _projection(self, tokens, self.config.hidden, self.config.experts)

    def preview_route(self, tokens: int) -> Amount:
        """Norm and router of a later layer, on their own; priced as a small `route`."""
        flops, nbytes, _ = self.router(tokens)
        weights = self.config.hidden * self.config.experts * self.element
        return Amount(flops, nbytes, _by_residency("route", weights, tokens, 1, self.resident.dense))

    def expert(self, tokens: int) -> Amount:
        """The feed-forward network of one expert for `tokens` tokens; it is resident with the mean probability."""
        return self._expert(tokens, self.resident.experts)

    def resident_expert(self, tokens: int) -> Amount:
        """The same for an expert whose weights are resident."""
        return self._expert(tokens, 1.0)

    def fetched_expert(self, tokens: int) -> Amount:
        """The same for an expert whose weights were fetched."""
        return self._expert(tokens, 0.0)

    def experts(self, tokens: int) -> Amount:
        """All experts of a layer for a micro-batch with unknown routing: the expectation under uniform routing."""
        config = self.config
        used = config.experts * (1 - (1 - config.top_k / config.experts) ** tokens)
        each = self.expert(tokens * config.top_k) if used else Amount(0, 0)
        rows = tokens * config.top_k / used if used else 0
        parts = _by_residency("experts", self.expert_bytes, rows, used, self.resident.experts)
        return Amount(each.flops, each.nbytes + (used - 1) * self.expert_bytes, parts)

    def combine(self, tokens: int) -> Amount:
        """Weighted sum of the experts' outputs, and the residual."""
        moved = (self.config.top_k + 2) * tokens * self.hidden_bytes
        return Amount(
            2.0 * tokens * self.config.top_k * self.config.hidden, moved, (WorkPart("combine", moved),)
        )

    def add_residual(self, tokens: int) -> Amount:
        """Addition of the residual to a finished sum of the experts' outputs."""
        moved = tokens * (self.sum_bytes + 2 * self.hidden_bytes)
        return Amount(float(tokens * self.config.hidden), moved, (WorkPart("combine", moved),))

    def take_rows(self, tokens: int) -> Amount:
        """Gathering of the rows of each expert."""
        moved = 2 * self.config.top_k * tokens * self.hidden_bytes
        return Amount(0, moved, (WorkPart("combine", moved),))

    def _expert(self, tokens: int, resident: float) -> Amount:
        config = self.config
        activations = tokens * (2 * config.hidden + 3 * config.intermediate) * self.element
        parts = _by_residency("expert", self.expert_bytes, tokens, 1, resident)
        return Amount(
            6.0 * tokens * config.hidden * config.intermediate, self.expert_bytes + activations, parts
        )


@dataclass(frozen=True, eq=False)
class Operations(AttentionOperations, ExpertOperations):
    """All operations of one model in one dtype; defines those outside the layers and those that combine others."""

    def embed(self, tokens: int) -> Amount:
        """Look up rows of the embedding."""
        moved = 2 * tokens * self.hidden_bytes
        return Amount(0, moved, (WorkPart("embed", moved),))

    def route(self, tokens: int) -> Amount:
        """Output projection, norm and router: all operations that precede the choice of experts."""
        return _sum(self.output_projection(tokens), self.router(tokens))

    def post_attention(self, tokens: int) -> Amount:
        """Output projection, router, all experts and their sum."""
        return _sum(self.route(tokens), self.experts(tokens), self.combine(tokens))

    def after_projection(self, tokens: int) -> Amount:
        """`post_attention` without the output projection, for ranks that must first add their partial projections."""
        return _sum(self.router(tokens), self.experts(tokens), self.combine(tokens))

    def all_reduce(self, nbytes: int) -> Amount:
        """Ring all-reduce of `nbytes`: the bytes that each rank sends."""
        ranks = self.config.ranks
        return Amount(0, 2 * (ranks - 1) / ranks * nbytes)

    def sample(self, sequences: int) -> Amount:
        """Final norm, LM head, and the choice of a token."""
        config = self.config
        rows = config.vocabulary // config.ranks
        flops, nbytes, _ = _projection(self, sequences, config.hidden, rows)
        weights = config.hidden * rows * self.element
        return Amount(
            flops, nbytes, _by_residency("sample", weights, sequences, 1, not config.tied_embeddings)
        )

    def choice(self, sequences: int) -> Amount:
        """Choice of a token from finished logits."""
        return Amount(0, sequences * self.logits_bytes)


def _projection(sizes: TensorSizes, tokens: int, inputs: int, outputs: int) -> Amount:
    moved = (inputs * outputs + tokens * (inputs + outputs)) * sizes.element
    return Amount(2.0 * tokens * inputs * outputs, moved)


def _by_residency(
    operation: str, weights: int, rows: float, times: float, resident: float
) -> tuple[WorkPart, ...]:
    """An operation on `weights` bytes of weights, split by whether they are resident: costs are measured for either."""
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

"""The work of each operation of a MoE transformer: FLOPs, and bytes read and written.

Differences between kinds of attention are in `layers.py`. An `Amount` also lists its parts, so that a table of measured
costs can price them one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from operator import ne
from types import MappingProxyType
from typing import NamedTuple

from moesched.models.layers import GroupedAttention, Layer, LinearAttention
from moesched.models.tensor_shapes import Shape, elements
from moesched.models.tensor_sizes import BytesByFormat, TensorSizes
from moesched.work import WorkPart

_ATTENTION = WorkPart("attention", 0)


@cache
def _calls(count: int) -> WorkPart:
    """Return a WorkPart for the fixed costs of `count` calls of an attention kernel; it has no bytes and no FLOPs."""
    return WorkPart("attention call", 0, times=count)


class Amount(NamedTuple):
    """The FLOPs and bytes of an operation.

    Attributes:
        flops: floating-point operations.
        nbytes: bytes moved between a processor and its memory.
        parts: the operation in parts that a table of measured costs can price.
        kernel_rate: share, from 0 to 1, of a processor's FLOP/s that kernels reach with the operation's weights.
    """

    flops: float
    nbytes: float
    parts: tuple[WorkPart, ...] = ()
    kernel_rate: float = 1.0


class Product(NamedTuple):
    """Matrices by which each row of an input is multiplied.

    Attributes:
        elements: number of elements of the matrices.
        nbytes: bytes of the matrices.
        kernel_rate: share, from 0 to 1, of a processor's FLOP/s that kernels reach with the slowest of the matrices.
        coded: pairs (storage format, bytes) of the quantised matrices. Matrices that are not quantised, but are stored
            transposed, have the name `COLUMNS` instead of a format.
    """

    elements: int
    nbytes: int
    kernel_rate: float
    coded: BytesByFormat

    def parts(self, operation: str, rows: float, resident: float, times: float = 1) -> tuple[WorkPart, ...]:
        """Return two WorkParts for `times` equal products: those with resident weights, and the others.

        A part without products is left out.

        Args:
            operation: name of the part with the other weights; the part with resident weights is called "resident "
                and this name.
            rows: number of rows of each product.
            resident: share, from 0 to 1, of the weights that are resident: they stay in the accelerator's memory.
            times: number of equal products.
        """
        parts = (
            WorkPart(f"resident {operation}", self.nbytes, rows, times * resident, self.coded),
            WorkPart(operation, self.nbytes, rows, times * (1.0 - resident), self.coded),
        )
        return tuple(part for part in parts if part.times)


class Products(TensorSizes):
    """Base of classes that compute the costs of operations which multiply rows by a layer's matrices."""

    def _product(self, shapes: Mapping[str, Shape]) -> Product:
        """Return the matrices among these tensors as one product; vectors are left out, as their costs are small.

        Args:
            shapes: shapes of tensors by name.
        """
        matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1}
        rates = [self.config.kernel_rate(name, self.layer) for name in matrices]
        return Product(
            elements(matrices.values()),
            self.bytes_of(matrices),
            min(rates, default=1.0),
            self.coded_bytes(matrices),
        )

    def _times(self, product: Product, tokens: int, width: int) -> tuple[float, float]:
        """Return (FLOPs, bytes) of a product with `tokens` rows.

        Args:
            width: number of elements per token of inputs and outputs together.
        """
        return 2.0 * tokens * product.elements, product.nbytes + tokens * width * self.element


class AttentionOperations(Products):
    """FLOPs and bytes of attention, of the projections before and after it, and of reading and writing the KV cache."""

    @cached_property
    def before_attention(self) -> Product:
        """The matrices of the projections before attention."""
        return self._product(self.layer.attention.shapes_before(self.config.hidden))

    @cached_property
    def after_attention(self) -> Product:
        """The matrix of the output projection."""
        return self._product(self.layer.attention.shapes_after(self.config.hidden))

    def pre_attention(self, tokens: int) -> Amount:
        """Return the cost of norm, QKV projection and rotary embedding for `tokens` tokens."""
        product = self.before_attention
        flops, nbytes = self._times(product, tokens, self.config.hidden + self.layer.attention.qkv_width)
        parts = product.parts("pre_attention", tokens, self.resident.dense)
        return Amount(flops, nbytes, parts, product.kernel_rate)

    def attention(self, lengths: Sequence[tuple[int, int]]) -> Amount:
        """Return the cost of attention for several sequences.

        Args:
            lengths: for each sequence, (number of new tokens, number of tokens in the cache afterwards).
        """
        attention = self.layer.attention
        if isinstance(attention, LinearAttention):
            return self._linear_attention(attention, sum(new for new, _ in lengths), len(lengths))
        window = attention.window if isinstance(attention, GroupedAttention) else None
        cached, moved = self.kv_bytes, self.qkv_bytes + self.attention_bytes
        pairs = nbytes = stepped = steps = calls = prompts = prompt_pairs = before = 0
        for new, total in lengths:
            first = total - new
            pairs_before = pairs
            if window is None or total <= window:
                pairs += new * first + new * (new + 1) // 2
            else:
                within = min(new, max(0, window - first))
                pairs += within * first + within * (within + 1) // 2 + (new - within) * window
            seen = total if window is None else min(total, window + new)
            nbytes += seen * cached + new * moved
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
        in_prompts = prompt_pairs * attention.prompt_flops
        if prompts:
            parts.append(WorkPart("attention prompt", in_prompts / prompts, times=prompts))
        return Amount(in_prompts + (pairs - prompt_pairs) * attention.step_flops, nbytes, tuple(parts))

    def attention_step(self, totals: Sequence[int]) -> Amount:
        """Return the cost of attention for one new token per sequence, as `attention` does, but faster.

        Args:
            totals: for each sequence, the number of tokens in the cache afterwards.
        """
        attention = self.layer.attention
        if isinstance(attention, LinearAttention):
            return self._linear_attention(attention, len(totals), len(totals))
        window = attention.window if isinstance(attention, GroupedAttention) else None
        seen = pairs = sum(totals)
        if window is not None:
            seen = sum(min(total, window + 1) for total in totals)
            pairs = sum(min(total, window) for total in totals)
        calls = 1 + sum(map(ne, totals, totals[1:]))
        cache = seen * self.kv_bytes
        moved = len(totals) * (self.qkv_bytes + self.attention_bytes)
        parts = (_ATTENTION, _calls(calls), self._attention_steps(seen, len(totals)))
        return Amount(pairs * attention.step_flops, cache + moved, parts)

    def _linear_attention(self, attention: LinearAttention, tokens: int, sequences: int) -> Amount:
        """Return the cost of linear attention; each sequence's state is read and written once, whatever its length.

        Args:
            tokens: number of new tokens of all sequences together.
            sequences: number of sequences.
        """
        states = 2 * sequences * self.state_bytes
        heads = attention.cached_heads
        parts = (
            WorkPart("attention", 0),
            WorkPart("attention call", 0, times=1),
            WorkPart("step attention", 2 * self.state_bytes / heads, heads, sequences),
        )
        moved = tokens * (self.qkv_bytes + self.attention_bytes)
        return Amount(tokens * attention.token_flops, states + moved, parts)

    def _attention_steps(self, seen: float, sequences: int) -> WorkPart:
        """Return the cost of attention of one new token per sequence, as a part that a table of costs can price.

        Args:
            seen: number of tokens attended to, of all sequences together.
            sequences: number of sequences.

        Returns:
            A part with one operation for each sequence. The part's `size` is the mean bytes of a KV head in a
            sequence's cache, and its `rows` is the number of KV heads.
        """
        heads = self.layer.attention.cached_heads
        return WorkPart("step attention", seen * self.kv_bytes / sequences / heads, heads, sequences)

    def output_projection(self, tokens: int) -> Amount:
        """Return the cost, for `tokens` tokens, of the output projection of attention and of adding the residual."""
        product = self.after_attention
        flops, nbytes = self._times(product, tokens, self.query_width + self.config.hidden)
        parts = product.parts("route", tokens, self.resident.dense)
        return Amount(flops, nbytes, parts, product.kernel_rate)


class ExpertOperations(Products):
    """Costs of the MoE block of a layer: router, experts, and the sum of their outputs."""

    @cached_property
    def routing(self) -> Product:
        """The router's matrix; without elements in a layer without experts."""
        return self._product({"router": (self.layer.feed_forward.experts, self.config.hidden)})

    @cached_property
    def expert_product(self) -> Product:
        """The matrices of one expert."""
        return self._product(self.expert_shapes)

    @cached_property
    def shared_experts(self) -> Product:
        """The matrices of the shared network, which every token uses: shared experts, or a dense layer's network."""
        shapes = self.layer.feed_forward.shapes(self.config.hidden)
        return self._product({name: shapes[name] for name in shapes if name.startswith("shared_")})

    def router(self, tokens: int) -> Amount:
        """Return the cost, for `tokens` tokens, of norm, router and shared experts, which all tokens use."""
        feed_forward, hidden = self.layer.feed_forward, self.config.hidden
        flops, nbytes = self._times(self.routing, tokens, hidden + feed_forward.experts)
        if not feed_forward.shared:
            return Amount(flops, nbytes)
        more, moved = self._times(self.shared_experts, tokens, 2 * hidden + 3 * feed_forward.shared)
        parts = self.shared_experts.parts("expert", tokens, self.resident.dense)
        return _sum(Amount(flops, nbytes), Amount(more, moved, parts, self.shared_experts.kernel_rate))

    def preview_route(self, tokens: int) -> Amount:
        """Return the cost, for `tokens` tokens, of running a later layer's norm and router early.

        In a table of measured costs, the product with the router's matrix is looked up as the operation "route".
        """
        product = self.routing
        flops, nbytes = self._times(product, tokens, self.config.hidden + self.layer.feed_forward.experts)
        return Amount(flops, nbytes, product.parts("route", tokens, self.resident.dense))

    def expert(self, tokens: int) -> Amount:
        """Return the cost of one expert on `tokens` tokens, averaged over resident and fetched experts."""
        return self._expert(tokens, self.resident.experts)

    def resident_expert(self, tokens: int) -> Amount:
        """Return the cost of one expert on `tokens` tokens, if its weights stay in the accelerator's memory."""
        return self._expert(tokens, 1.0)

    def fetched_expert(self, tokens: int) -> Amount:
        """Return the cost of one expert on `tokens` tokens, if its weights were just copied to the accelerator."""
        return self._expert(tokens, 0.0)

    def cached_expert(self, tokens: int) -> Amount:
        """Return the cost of one expert on `tokens` tokens, if its weights have been there since an earlier task."""
        return self._expert(tokens, 0.0, "cached expert")

    def experts(self, tokens: int, chosen: Sequence[int] | None = None) -> Amount:
        """Return the cost of a layer's experts for `tokens` tokens.

        Args:
            chosen: rows of each expert that has any; by default those expected if tokens choose experts uniformly.
        """
        network = self.layer.feed_forward
        rows = tokens * network.top_k
        if not rows:
            return Amount(0, 0)
        if chosen is None:
            mean = network.experts * (1 - (1 - network.top_k / network.experts) ** tokens)
            experts_with: Mapping[float, float] = {rows / mean: mean}
        else:
            experts_with = Counter(chosen)
        each = self.expert(rows)
        nbytes = each.nbytes + (sum(experts_with.values()) - 1) * self.expert_bytes
        parts = [
            self.expert_product.parts("experts", of_each, self.resident.experts, experts)
            for of_each, experts in experts_with.items()
        ]
        return Amount(each.flops, nbytes, tuple(chain.from_iterable(parts)), each.kernel_rate)

    def combine(self, tokens: int) -> Amount:
        """Return the cost, for `tokens` tokens, of the weighted sum of expert outputs and of adding the residual."""
        top_k = self.layer.feed_forward.top_k
        moved = (top_k + 2) * tokens * self.hidden_bytes
        return Amount(2.0 * tokens * top_k * self.config.hidden, moved, (WorkPart("combine", moved),))

    def add_residual(self, tokens: int) -> Amount:
        """Return the cost, for `tokens` tokens, of adding the residual to expert outputs that an exchange summed."""
        moved = tokens * (self.sum_bytes + 2 * self.hidden_bytes)
        return Amount(float(tokens * self.config.hidden), moved, (WorkPart("combine", moved),))

    def take_rows(self, tokens: int) -> Amount:
        """Return the cost of gathering the input rows of all experts for `tokens` tokens."""
        moved = 2 * self.layer.feed_forward.top_k * tokens * self.hidden_bytes
        return Amount(0, moved, (WorkPart("combine", moved),))

    def _expert(self, tokens: int, resident: float, operation: str = "expert") -> Amount:
        hidden, width = self.config.hidden, self.layer.feed_forward.intermediate
        activations = tokens * (2 * hidden + 3 * width) * self.element
        parts = self.expert_product.parts(operation, tokens, resident)
        nbytes = self.expert_bytes + activations
        return Amount(6.0 * tokens * hidden * width, nbytes, parts, self.expert_product.kernel_rate)


@dataclass(frozen=True, eq=False)
class Operations(AttentionOperations, ExpertOperations):
    """FLOPs and bytes of a model's operations, in one dtype.

    The base classes have the operations within layers, for one kind of layer. This class has the operations outside of
    layers, and sums of several operations.
    """

    @cached_property
    def kinds(self) -> Mapping[Layer, Operations]:
        """For each kind of layer, an object with the costs of this kind of layer."""
        return MappingProxyType(
            {kind: self if kind == self.layer else replace(self, kind=kind) for kind in self.config.kinds}
        )

    @cached_property
    def by_layer(self) -> tuple[Operations, ...]:
        """For each layer, the object with the costs of its kind."""
        return tuple(self.kinds[self.config.layer(layer)] for layer in range(self.config.layers))

    def held_in(self, layers: Iterable[int], requests: Sequence[int], beams: int = 1) -> int:
        """Return the bytes of the caches of some layers.

        Args:
            layers: numbers of the layers.
            requests: for each request, its number of cached tokens, summed over its beams.
            beams: number of beams of each request.
        """
        counts = Counter(self.by_layer[layer] for layer in layers)
        return sum(times * kind.held_bytes(requests, beams) for kind, times in counts.items())

    def copy_kv(self, tokens: int) -> Amount:
        """Return the cost of copying the keys and values of `tokens` tokens in all layers within the KV cache."""
        token = sum(times * self.kinds[kind].kv_bytes for kind, times in self.config.kinds.items())
        moved = 2 * tokens * token
        return Amount(0, moved, (WorkPart("embed", moved),))

    def embed(self, tokens: int) -> Amount:
        """Return the cost of looking up the embeddings of `tokens` tokens."""
        moved = 2 * tokens * self.hidden_bytes
        return Amount(0, moved, (WorkPart("embed", moved),))

    def route(self, tokens: int) -> Amount:
        """Return the cost, for `tokens` tokens, of output projection, norm and router, before the experts."""
        return _sum(self.output_projection(tokens), self.router(tokens))

    def post_attention(self, tokens: int, chosen: Sequence[int] | None = None) -> Amount:
        """Return the cost, for `tokens` tokens, of output projection, router, all experts and their weighted sum.

        Args:
            chosen: rows of each expert that has any, as for `experts`.
        """
        return _sum(self.route(tokens), self.experts(tokens, chosen), self.combine(tokens))

    def after_projection(self, tokens: int, chosen: Sequence[int] | None = None) -> Amount:
        """Return the cost of `post_attention` without the output projection.

        Tensor-parallel ranks add up their output projections before these operations.

        Args:
            chosen: rows of each expert that has any, as for `experts`.
        """
        return _sum(self.router(tokens), self.experts(tokens, chosen), self.combine(tokens))

    def all_reduce(self, nbytes: int) -> Amount:
        """Return the cost of a ring all-reduce of `nbytes` bytes; the cost counts the bytes that each rank sends."""
        ranks = self.config.ranks
        return Amount(0, 2 * (ranks - 1) / ranks * nbytes)

    def sample(self, sequences: int) -> Amount:
        """Return the cost of final norm, LM head, and the choice of a token for each of `sequences` sequences."""
        config = self.config
        rows = config.vocabulary // config.ranks
        head = "embedding" if config.tied_embeddings else "lm_head"
        product = self._product({head: (rows, config.hidden)})
        flops, nbytes = self._times(product, sequences, config.hidden + rows)
        parts = product.parts("sample", sequences, not config.tied_embeddings)
        return Amount(flops, nbytes, parts, product.kernel_rate)

    def choice(self, sequences: int) -> Amount:
        """Return the cost of choosing a token for each of `sequences` sequences from finished logits."""
        return Amount(0, sequences * self.logits_bytes)


def _sum(*amounts: Amount) -> Amount:
    flops = sum(each.flops for each in amounts)
    at_full_rate = sum(each.flops / each.kernel_rate for each in amounts)
    return Amount(
        flops,
        sum(each.nbytes for each in amounts),
        tuple(part for each in amounts for part in each.parts),
        flops / at_full_rate if at_full_rate else 1.0,
    )

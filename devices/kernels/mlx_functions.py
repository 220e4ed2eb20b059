"""The operations of a MoE transformer on MLX, as pure functions of arrays, which are lazy: the caller evaluates them.

The letters at the end of an array's name are its dimensions, as in `functions.py`. A weight matrix (N, D) comes as
blocks (D, some of N) of its transpose, left to right. Experts' matrices come in stacks, whose blocks are for several
experts: (E, D, some of N), or (E, some of D, N) where the files hold the transpose. Operations that decide accuracy are
computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import NamedTuple

import mlx.core as mx

from moesched.models.config import ModelConfig, NormKind
from moesched.models.footprint import EXPERT_TILE, EXPERTS_AT_ONCE, QUERY_TILE
from moesched.models.layers import GroupedAttention
from moesched.models.networks import SUM_EPSILON, FeedForward, Router

from . import mlx_elements

Array = mx.array
Blocks = Sequence[Array]
Product = Callable[[Array, Blocks], Array]

MANY_ROWS = 64
"""Number of experts' rows from which on `gather_mm` is told that rows are sorted by expert.

Metal then reads an expert's weights once for neighbouring rows, by another kernel, whose results have other last bits.
"""


class Stack(NamedTuple):
    """The gate, up and down matrices of several experts, each as a list of blocks (E experts, D, some of N columns).

    Attributes:
        transposed_down: True if the blocks of down are (E, some of D, N) instead.
    """

    gate: Blocks
    up: Blocks
    down: Blocks
    transposed_down: bool


class Rows(NamedTuple):
    """The experts that input rows belong to; the rows are sorted by expert.

    Attributes:
        indices_n: for each row, the index of its expert in the stack, uint32, ascending.
        counts: number of rows of each expert of the stack; None if the host does not know them, so that experts cannot
            run one by one.
        many: True if the micro-batch has at least `MANY_ROWS` (64) rows.
    """

    indices_n: Array
    counts: Sequence[int] | None
    many: bool


class KVView(NamedTuple):
    """The cached keys and values of S sequences of one length L; the last `queries` tokens of each sequence are new."""

    keys_SLKd: Array
    values_SLKd: Array
    queries: int


def linear(x_TD: Array, blocks: Blocks) -> Array:
    """Multiply rows by W: x @ W, (T, N); W comes as blocks (D, some of N) of its columns."""
    return _joined([x_TD @ block for block in blocks], axis=-1)


def norm(x_TD: Array, weight_D: Array, eps: float, kind: NormKind = "rms") -> Array:
    """Normalise each token by its root mean square ("rms") or by mean and variance, and multiply by the weight."""
    if kind == "layer":
        return mx.fast.layer_norm(x_TD, weight_D, None, eps).astype(x_TD.dtype)
    return mx.fast.rms_norm(x_TD, weight_D, eps).astype(x_TD.dtype)


def _joined(parts: list[Array], axis: int) -> Array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


def rotary_angles(positions_T: Array, attention: GroupedAttention) -> tuple[Array, Array]:
    """Compute cosines and sines, (T, 1, w) float32 each, that rotate the first w entries of heads by position.

    The first half of each token's sines is negated.
    """
    rotary, head_dim = attention.rotary, attention.head_dim
    width = rotary.turning(head_dim)
    frequencies_h = 1.0 / rotary.theta ** (mx.arange(0, width, 2, dtype=mx.float32) / width)
    if slowed := rotary.slowed(head_dim):
        frequencies_h = frequencies_h * mx.array(slowed)
    angles = positions_T[:, None].astype(mx.float32) * frequencies_h
    cos, sin = mx.cos(angles) * rotary.magnitude, mx.sin(angles) * rotary.magnitude
    return mx.concatenate([cos, cos], -1)[:, None], mx.concatenate([-sin, sin], -1)[:, None]


def apply_rotary(x_THd: Array, cos_T1w: Array, sin_T1w: Array, *, interleaved: bool = False) -> Array:
    """Rotate the first w entries of each head by the angles from `rotary_angles`; entries i and i + w/2 make a pair.

    interleaved: True if entries 2i and 2i + 1 make a pair instead; the rotated pair goes to entries i and i + w/2.
    """
    width = cos_T1w.shape[-1]
    turning = x_THd[..., :width]
    if interleaved:
        turning = turning.reshape(*x_THd.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(turning.shape)
    first, second = mx.split(turning, 2, axis=-1)
    swapped = mx.concatenate([second, first], axis=-1)
    turned = mlx_elements.turned(turning, swapped, cos_T1w, sin_T1w)
    return _joined([turned, x_THd[..., width:]] if width < x_THd.shape[-1] else [turned], axis=-1)


def project_qkv(
    hidden_TD: Array,
    angles: tuple[Array, Array],
    weights: Mapping[str, Blocks],
    config: ModelConfig,
    attention: GroupedAttention,
) -> tuple[Array, Array, Array]:
    """Compute queries (T, H, d), keys and values (T, K, d) from hidden states: norms, projection, clipping, rotation.

    Args:
        angles: cosines and sines as `rotary_angles` gives them.
        weights: `attention_norm` and `qkv`, and where the model has them `q_norm` and `k_norm`.
    """
    x_TX = linear(norm(hidden_TD, weights["attention_norm"][0], config.norm_eps, config.norm), weights["qkv"])
    queries, head_dim = attention.query_width, attention.head_dim
    keys = queries + attention.key_width
    if attention.qk_norm:
        q_TX, k_TX, v_TX = mx.split(x_TX, (queries, keys), axis=-1)
        q_TX = _normed_heads(q_TX, weights["q_norm"][0], config.norm_eps)
        k_TX = _normed_heads(k_TX, weights["k_norm"][0], config.norm_eps)
        x_TX = mx.concatenate([q_TX, k_TX, v_TX], axis=-1)
    if attention.clip is not None:
        x_TX = mlx_elements.clipped(x_TX, attention.clip)
    qk_TX, v_TX = mx.split(x_TX, (keys,), axis=-1)
    tokens = len(x_TX)
    interleaved = attention.rotary.interleaved
    qk_THd = apply_rotary(qk_TX.reshape(tokens, -1, head_dim), *angles, interleaved=interleaved)
    q_THd, k_TKd = mx.split(qk_THd, (attention.heads,), axis=1)
    return q_THd, k_TKd, v_TX.reshape(tokens, -1, head_dim)


def _normed_heads(x_TX: Array, weight: Array, eps: float) -> Array:
    """Normalise each head's entries, or the whole projection if the norm's weight is as wide as the projection."""
    return norm(x_TX.reshape(len(x_TX), -1, len(weight)), weight, eps).reshape(len(x_TX), -1)


def attention(q_THd: Array, views: Sequence[KVView], window: int | None = None) -> Array:
    """Attend from T new tokens, each over the earlier tokens of its own sequence and itself; returns (T, H * d).

    Args:
        q_THd: queries of the new tokens: view by view, and within a view sequence by sequence.
        views: the keys and values of all sequences, in groups of sequences of one length.
        window: number of tokens that a query sees, itself included; None for itself and all earlier tokens.
    """
    parts = []
    start = 0
    for view in views:
        sequences = view.keys_SLKd.shape[0]
        stop = start + sequences * view.queries
        q_SHqd = q_THd[start:stop].reshape(sequences, view.queries, *q_THd.shape[1:]).swapaxes(1, 2)
        parts.append(_attend(q_SHqd, view, window).swapaxes(1, 2).reshape(stop - start, -1))
        start = stop
    return _joined(parts, axis=0)


def _attend(q_SHqd: Array, view: KVView, window: int | None) -> Array:
    past = view.keys_SLKd.shape[1] - view.queries
    tiles = []
    for start in range(0, view.queries, QUERY_TILE):
        stop = min(start + QUERY_TILE, view.queries)
        first = 0 if window is None else max(0, past + start - window + 1)
        keys_SKLd, values_SKLd = (
            each[:, first : past + stop].swapaxes(1, 2) for each in (view.keys_SLKd, view.values_SLKd)
        )
        tiles.append(
            mx.fast.scaled_dot_product_attention(
                q_SHqd[:, :, start:stop],
                keys_SKLd,
                values_SKLd,
                scale=1 / math.sqrt(q_SHqd.shape[-1]),
                mask=_mask(past + start, past + stop, first, window),
            )
        )
    return _joined(tiles, axis=2)


def _mask(start: int, stop: int, first_key: int, window: int | None) -> Array | str | None:
    """Return a mask (queries start .. stop-1, keys first_key .. stop-1, by position): True where a query sees a key.

    The result is None for a single query, since it sees all of these keys. For several queries without a window it is
    "causal", MLX's name of that mask.
    """
    if stop - start == 1:
        return None  # all of them
    if window is None:
        return "causal"
    query, key = mx.arange(start, stop)[:, None], mx.arange(first_key, stop)
    return (key <= query) & (key > query - window)


def router_logits(x_TD: Array, router: Blocks) -> Array:
    """Compute the router's logits (T tokens, E experts), float32."""
    return linear(x_TD.astype(mx.float32), [block.astype(mx.float32) for block in router])


def scores(logits_TE: Array) -> Array:
    """Return the probability that the router gives each expert, averaged over the tokens: (E), float32."""
    return mx.softmax(logits_TE, axis=-1).mean(axis=0)


def choose_experts(
    logits_TE: Array, network: FeedForward, bias_E: Array | None = None
) -> tuple[Array, Array]:
    """Choose each token's k experts by logits; returns experts (uint32, ascending) and weights (float32), both (T, k).

    bias_E: correction that is added to the scores to choose experts, but not in the weights; None without one.
    """
    router, top_k = network.router, network.top_k
    scores_TE = logits_TE if router.score == "softmax" else mx.sigmoid(logits_TE)
    choice_TE = within_groups(scores_TE if bias_E is None else scores_TE + bias_E, router)
    if top_k < logits_TE.shape[-1]:
        experts_Tk = mx.argpartition(-choice_TE, kth=top_k - 1, axis=-1)[:, :top_k]
    else:
        experts_Tk = mx.broadcast_to(mx.arange(top_k), logits_TE.shape)
    experts_Tk = mx.sort(experts_Tk.astype(mx.uint32), axis=-1)
    chosen_Tk = mx.take_along_axis(scores_TE, experts_Tk, axis=-1)
    if router.score == "sigmoid":
        if router.normalised:
            chosen_Tk = chosen_Tk / (chosen_Tk.sum(-1, keepdims=True) + SUM_EPSILON)
        return experts_Tk, chosen_Tk * router.scale
    if router.normalised:
        weights_Tk = mx.softmax(chosen_Tk, axis=-1)
    else:
        weights_Tk = mlx_elements.probability(chosen_Tk, mx.logsumexp(logits_TE, axis=-1, keepdims=True))
    return experts_Tk, weights_Tk if router.scale == 1 else weights_Tk * router.scale


def within_groups(choice_TE: Array, router: Router) -> Array:
    """Replace the scores of experts outside of each token's best groups by minus infinity; returns (T, E).

    A group's score is the sum of its two highest scores; the `kept_groups` groups with the highest scores are kept.

    choice_TE: the scores by which experts are chosen.
    """
    if router.kept_groups == router.groups:
        return choice_TE
    choice_TGe = choice_TE.reshape(len(choice_TE), router.groups, -1)
    scores_TG = mx.topk(choice_TGe, 2, axis=-1).sum(-1)
    kept_Tk = mx.argpartition(-scores_TG, kth=router.kept_groups - 1, axis=-1)[:, : router.kept_groups]
    is_kept_TG = (kept_Tk[:, :, None] == mx.arange(router.groups)).any(axis=1)
    return mx.where(is_kept_TG[:, :, None], choice_TGe, -mx.inf).reshape(choice_TE.shape)


class Grouping(NamedTuple):
    """The input rows of experts, one for each pair of a token and a chosen expert, sorted by expert, then by token.

    Attributes:
        x_nD: the rows.
        experts_n: the expert of each row.
        rows_Tk: the row of each pair; None for a single token, whose rows are in the order of its experts.
    """

    x_nD: Array
    experts_n: Array
    rows_Tk: Array | None


def group_by_expert(x_TD: Array, experts_Tk: Array) -> Grouping:
    """Copy each token's hidden state to a row for each expert that the token chose, sorted by expert."""
    tokens, top_k = experts_Tk.shape
    if tokens == 1:
        return Grouping(mx.broadcast_to(x_TD, (top_k, x_TD.shape[1])), experts_Tk.reshape(-1), None)
    tokens_n, experts_n, rows_Tk = sort_rows(experts_Tk)
    return Grouping(x_TD[tokens_n], experts_n, rows_Tk)


def sort_rows(experts_Tk: Array) -> tuple[Array, Array, Array]:
    """Sort pairs of token and expert by expert, so that each becomes a row.

    Returns the token (n) and the expert (n) of each row, and the row of each pair (T, k).
    """
    flat = experts_Tk.reshape(-1)
    order_n = mx.argsort(flat)
    return order_n // experts_Tk.shape[1], flat[order_n], mx.argsort(order_n).reshape(experts_Tk.shape)


def gathered_experts(stack: Stack, x_nD: Array, rows: Rows) -> Array:
    """Run a stack's experts on n rows by kernels that gather matrices: down @ (silu(gate @ x) * (up @ x)), (n, D).

    A row's result depends on no other row, so the result is the same if experts run together or one by one.
    """
    tiles = [_ffn(x, stack, product).squeeze(1) for x, product in _gathered(x_nD[:, None], rows)]
    return _joined(tiles, axis=0)


def experts_one_by_one(stack: Stack, x_nD: Array, rows: Rows) -> Array:
    """Run a stack's experts one after the other, each on its rows of x; returns (n, D). It needs `rows.counts`."""
    assert rows.counts is not None, "the host knows the rows"
    return _joined([_ffn(x, stack, product) for x, product in _one_by_one(x_nD, rows.counts)], axis=0)


def _ffn(x_nD: Array, stack: Stack, product: Product) -> Array:
    inner_nI = mlx_elements.swiglu(product(x_nD, stack.gate), product(x_nD, stack.up))
    if not stack.transposed_down:
        return product(inner_nI, stack.down)
    return _sum_of_products(inner_nI, stack.down, product)


def _sum_of_products(x_nI: Array, blocks: Blocks, product: Product) -> Array:
    """Multiply rows (n, I) by experts' matrices in blocks (E experts, some of I, D); returns the sum (n, D).

    Each block is multiplied by its own columns of x. The products, computed by `product`, are added in float32, and the
    sum is rounded once.
    """
    if len(blocks) == 1:
        return product(x_nI, blocks)
    ends = list(accumulate(block.shape[1] for block in blocks))
    parts = mx.split(x_nI, ends[:-1], axis=-1)
    products = (product(x, [block]).astype(mx.float32) for x, block in zip(parts, blocks, strict=True))
    return mlx_elements.added(*products).astype(x_nI.dtype)


def _gathered(x_n1D: Array, rows: Rows) -> Iterator[tuple[Array, Product]]:
    """Yield x in tiles of rows, each with the function that multiplies every row by its own expert's matrix."""
    tile = EXPERTS_AT_ONCE * EXPERT_TILE
    count = len(x_n1D)
    if count <= tile:
        yield x_n1D, partial(_gather, rows.indices_n, rows.many)
        return
    for start in range(0, count, tile):
        stop = min(start + tile, count)
        yield x_n1D[start:stop], partial(_gather, rows.indices_n[start:stop], rows.many)


def _gather(indices_n: Array, many: bool, x_n1D: Array, blocks: Blocks) -> Array:
    """Multiply each row of x by its expert's matrix, in one MLX kernel for each block of columns.

    Args:
        indices_n: index of each row's expert in the blocks, ascending.
        many: True for at least `MANY_ROWS` rows.
    """
    own = None if many else _ascending(len(x_n1D))
    parts = [
        mx.gather_mm(x_n1D, block, lhs_indices=own, rhs_indices=indices_n, sorted_indices=many)
        for block in blocks
    ]
    return _joined(parts, axis=-1)


@cache
def _ascending(count: int) -> Array:
    """Return the integers from 0 to count - 1, cached; only for counts below `MANY_ROWS`."""
    return mx.array([*range(count)], dtype=mx.uint32)


def _one_by_one(x_nD: Array, counts: Sequence[int]) -> Iterator[tuple[Array, Product]]:
    """Yield tiles of rows of x, each with the function that multiplies the tile by a matrix of its expert.

    counts: number of rows of each expert; a tile has rows of one expert only.
    """
    start = 0
    for index, count in enumerate(counts):
        for first in range(start, start + count, EXPERT_TILE):
            yield x_nD[first : min(first + EXPERT_TILE, start + count)], partial(_multiply, index)
        start += count


def _multiply(index: int, x_nD: Array, blocks: Blocks) -> Array:
    return linear(x_nD, [block[index] for block in blocks])


def sum_experts(y_nD: Array, rows_Tk: Array | None, weights_Tk: Array) -> Array:
    """Sum each token's expert outputs, weighted by the router, in ascending order of expert: (T, D), float32.

    rows_Tk: the row of y for each pair of token and expert; None for a single token, whose rows are in order.
    """
    return mlx_elements.added(*_weighted(y_nD, rows_Tk, weights_Tk)).squeeze(1)


def combine(y_nD: Array, rows_Tk: Array | None, weights_Tk: Array, residual_TD: Array) -> Array:
    """Add each token's weighted sum of expert outputs, by `sum_experts`, to the residual, rounded once to its dtype."""
    parts = _weighted(y_nD, rows_Tk, weights_Tk)
    return mlx_elements.added_to(residual_TD[:, None], *parts).squeeze(1)


def _weighted(y_nD: Array, rows_Tk: Array | None, weights_Tk: Array) -> list[Array]:
    """Multiply expert outputs by their weights; returns k arrays (T, 1, D), float32, one for each expert of a token."""
    y_TkD = y_nD[None] if rows_Tk is None else y_nD[rows_Tk]
    weighted_TkD = mlx_elements.weighted(y_TkD, weights_Tk[:, :, None])
    return list(mx.split(weighted_TkD, weighted_TkD.shape[1], axis=1))

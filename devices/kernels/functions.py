"""The operations of a MoE transformer, as pure functions of tensors that are on one device.

Shapes in names: T tokens of all sequences together, D hidden size, H heads, K key-value heads, G heads that
share one of those, d head size, S sequences, L tokens in the cache, E experts, k experts per token, n rows of
experts, V vocabulary, N outputs of a matrix, X anything else.

A weight matrix (N, D) arrives as row blocks, top to bottom: a page may hold only a part of its rows. A model whose
files hold the transpose has column blocks, left to right, instead. A block is (N, D), its columns contiguous where it
is a transpose, or packed (see `packed_weights.py`). Hidden states have the weights' dtype; operations that decide
accuracy (norms, rotation, softmax, routing, the sum over experts) are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from moesched.models.config import ModelConfig, NormKind
from moesched.models.footprint import QUERY_TILE, TOKEN_TILE
from moesched.models.layers import GroupedAttention
from moesched.models.networks import Activation, FeedForward, Router

from ..products.linear import Blocks, Tensor, linear
from .fused_attention import queries_in_a_piece
from .sinks import attend_with_sinks

ACTIVATED_ROWS = 64
"""Rows that a limited activation has in float32 at a time: these take memory of one size, which is used again."""


class KVView(NamedTuple):
    """The cached keys and values of S sequences of one length, the new tokens' included.

    keys, values: (S, L, K, d), any strides. queries: number of new tokens at the end of each sequence.
    """

    keys_SLKd: Tensor
    values_SLKd: Tensor
    queries: int


class Order(NamedTuple):
    """The rows of a micro-batch, one for each expert of each token, sorted by expert, then by token.

    tokens_n: each row's token. rows_Tk: the row of each pair of token and expert.
    """

    tokens_n: Tensor
    rows_Tk: Tensor


# ---------------------------------------------------------------- the parts that everything uses


def norm(x_TD: Tensor, weight_D: Tensor, eps: float, kind: NormKind = "rms") -> Tensor:
    """Each token normalised, times the weight: (T, D), rounded once.

    kind: "rms" divides by the root mean square, "layer" normalises by mean and variance.
    """
    normalise = layer_norm if kind == "layer" else rms_norm
    tiles = tiles_of(x_TD)
    if len(tiles) == 1:
        return normalise(x_TD, weight_D, eps)
    out_TD = torch.empty_like(x_TD)
    for tile in tiles:
        out_TD[tile] = normalise(x_TD[tile], weight_D, eps)
    return out_TD


def layer_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Each token minus its mean, divided by its standard deviation, times the weight."""
    return F.layer_norm(x_TD.to(weight_D.dtype), weight_D.shape, weight_D, None, eps).to(x_TD.dtype)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Each token divided by its root mean square, times the weight."""
    return F.rms_norm(x_TD.to(weight_D.dtype), weight_D.shape, weight_D, eps).to(x_TD.dtype)


def embed(tokens_T: Tensor, embedding_VD: Tensor) -> Tensor:
    """The embeddings (T, D) of the tokens."""
    return embedding_VD.index_select(0, tokens_T)


# ---------------------------------------------------------------- attention


def rotary_angles(positions_T: Tensor, attention: GroupedAttention) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines (T, 1, w), float32, that rotate w entries of queries and keys by their positions."""
    frequencies_h = rotary_frequencies(attention, positions_T.device)
    return angles(positions_T, frequencies_h, attention.rotary.magnitude)


def rotary_frequencies(attention: GroupedAttention, device: torch.device) -> Tensor:
    """The angle by which each pair of a head's entries turns from one position to the next: (w / 2), float32."""
    rotary, head_dim = attention.rotary, attention.head_dim
    width = rotary.turning(head_dim)
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    frequencies_h = 1.0 / rotary.theta**exponents
    slowed = rotary.slowed(head_dim)
    return frequencies_h * torch.tensor(slowed, device=device) if slowed else frequencies_h


def angles(positions_T: Tensor, frequencies_h: Tensor, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """As `rotary_angles`, by the frequencies."""
    angles_Th = positions_T[:, None].float() * frequencies_h
    halves = angles_Th.cos() * magnitude, angles_Th.sin() * magnitude
    cos_T1w, sin_T1w = (half.repeat(1, 2)[:, None] for half in halves)
    sin_T1w[..., : len(frequencies_h)].neg_()
    return cos_T1w, sin_T1w


def apply_rotary(x_THd: Tensor, cos_T1w: Tensor, sin_T1w: Tensor, *, interleaved: bool = False) -> Tensor:
    """Heads whose first w entries are rotated by `rotary_angles`; entries i and i + w/2 of a head make a pair.

    interleaved: entries 2i and 2i + 1 make a pair instead, and go to i and i + w/2.
    """
    width = cos_T1w.shape[-1]
    turning = x_THd[..., :width]
    if interleaved:
        turning = turning.unflatten(-1, (-1, 2)).mT.flatten(-2)
    swapped = turning.roll(width // 2, dims=-1)
    turned = torch.addcmul(turning * cos_T1w, swapped, sin_T1w).to(x_THd.dtype)
    return turned if width == x_THd.shape[-1] else torch.cat([turned, x_THd[..., width:]], dim=-1)


def project_qkv(
    hidden_TD: Tensor,
    weights: Mapping[str, Blocks],
    angles: tuple[Tensor, Tensor],
    config: ModelConfig,
    attention: GroupedAttention,
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm, projection and rotation: queries (T, H, d), keys and values (T, K, d), all contiguous.

    Args:
        weights: a layer's row blocks by name: attention_norm, qkv, and q_norm and k_norm where it has them.
        angles: cosines and signed sines as `rotary_angles` gives them.
        attention: the description of the layer's attention.
    """
    x_TD = norm(hidden_TD, weights["attention_norm"][0], config.norm_eps, config.norm)
    return rotated_heads(linear(x_TD, weights["qkv"]), weights, angles, config, attention)


def qkv_bias(weights: Mapping[str, Blocks], attention: GroupedAttention) -> Tensor | None:
    """The bias of queries, keys and values (X), with zeros for projections that have none; None if none has one."""
    widths = {"q": attention.query_width, "k": attention.key_width, "v": attention.key_width}
    biases = {name: weights[f"{name}_bias"][0] for name in widths if name in attention.biases}
    if not biases:
        return None
    like = next(iter(biases.values()))
    return torch.cat([biases.get(name, like.new_zeros(width)) for name, width in widths.items()])


def rotated_heads(
    x_TX: Tensor,
    weights: Mapping[str, Blocks],
    angles: tuple[Tensor, Tensor],
    config: ModelConfig,
    attention: GroupedAttention,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add biases to projected queries, keys and values (T, X), split, normalise, clip and rotate them.

    They are returned as by `project_qkv`.
    """
    heads = attention.heads, attention.kv_heads, attention.kv_heads
    bias_X = qkv_bias(weights, attention)
    if bias_X is not None:
        bias_X = bias_X.to(x_TX.dtype)
    tokens, head_dim = len(x_TX), attention.head_dim
    q_THd, k_TKd, v_TKd = (x_TX.new_empty(tokens, count, head_dim) for count in heads)
    for tile in tiles_of(x_TX):
        x_tX = x_TX[tile] if bias_X is None else x_TX[tile] + bias_X
        if attention.qk_norm:
            qk_norms = weights["q_norm"][0], weights["k_norm"][0]
            _normalise_heads(x_tX, *heads[:2], qk_norms, config.norm_eps)
        if attention.clip is not None:
            x_tX = x_tX.clamp(-attention.clip, attention.clip)
        qk_tXd, v_tKd = x_tX.unflatten(1, (-1, head_dim)).split([sum(heads[:2]), heads[2]], dim=1)
        cos_t1w, sin_t1w = (each[tile] for each in angles)
        turned = apply_rotary(qk_tXd, cos_t1w, sin_t1w, interleaved=attention.rotary.interleaved)
        q_THd[tile], k_TKd[tile] = turned.split(heads[:2], dim=1)
        v_TKd[tile] = v_tKd
    return q_THd, k_TKd, v_TKd


def tiles_of(x_TD: Tensor) -> list[slice]:
    """Tiles of tokens, which bound the memory of operations that treat each token by itself; on a GPU a single one."""
    tokens = max(1, len(x_TD))
    size = TOKEN_TILE if x_TD.device.type == "cpu" else tokens
    return [slice(start, start + size) for start in range(0, tokens, size)]


def _normalise_heads(
    x_TX: Tensor, heads: int, kv_heads: int, weights: tuple[Tensor, Tensor], eps: float
) -> None:
    head = x_TX.shape[1] // (heads + 2 * kv_heads)
    queries, keys = heads * head, (heads + kv_heads) * head
    parts = x_TX[:, :queries], x_TX[:, queries:keys]
    for part, weight in zip(parts, weights, strict=True):
        part.copy_(rms_norm(part.reshape(len(part), -1, len(weight)), weight, eps).flatten(1))


def attention(
    q_THd: Tensor,
    views: Sequence[KVView],
    window: int | None = None,
    *,
    fused: bool = True,
    sinks_H: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of each sequence over its own cache: (T, H * d).

    q_THd: the new tokens of the first view's sequences, one after the other, then those of the second view's.
    window: number of tokens that a query sees, itself included; None for itself and all earlier tokens.
    fused: whether torch has a kernel for this that stores no scores; otherwise few queries are computed at a time.
    sinks_H: a score of each head that no token has; None for none.
    scale: as in `GroupedAttention`.

    The last bits of float32 depend on strides, on the alignment of queries and keys to cache lines, and on the number
    of cores: keep these the same to get the same bits.
    """
    parts = []
    start = 0
    for keys_SLKd, values_SLKd, queries in views:
        stop = start + keys_SLKd.shape[0] * queries
        many = partial(_attend_many_queries, fused=fused)
        attend = _attend_one_query if queries == 1 else many
        if sinks_H is not None:
            attend = partial(attend_with_sinks, sinks_H)
        parts.append(attend(q_THd[start:stop], keys_SLKd, values_SLKd, window, scale))
        start = stop
    return beside(parts)


def beside(parts: list[Tensor]) -> Tensor:
    """Join the rows of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    rows_TX = parts[0].new_empty(sum(map(len, parts)), parts[0].shape[1])
    torch._foreach_copy_(rows_TX.split([len(part) for part in parts]), parts)
    return rows_TX


def _attend_one_query(
    q_SHd: Tensor, keys_SLKd: Tensor, values_SLKd: Tensor, window: int | None, scale: float | None
) -> Tensor:
    # Heads that share keys act as queries of one head: no key is read twice, and no mask is needed.
    if window is not None:
        keys_SLKd, values_SLKd = keys_SLKd[:, -window:], values_SLKd[:, -window:]
    sequences, _, kv_heads, head_dim = keys_SLKd.shape
    q_SKGd = q_SHd.view(sequences, kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(
        q_SKGd, keys_SLKd.transpose(1, 2), values_SLKd.transpose(1, 2), scale=scale
    )
    return out.reshape(sequences, -1)


def _attend_many_queries(
    q_THd: Tensor,
    keys_SLKd: Tensor,
    values_SLKd: Tensor,
    window: int | None,
    scale: float | None,
    *,
    fused: bool,
) -> Tensor:
    queries = q_THd.chunk(keys_SLKd.shape[0])
    parts = [
        _attend_sequence(*one, window, scale, fused)
        for one in zip(queries, keys_SLKd, values_SLKd, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_sequence(
    q_THd: Tensor,
    keys_LKd: Tensor,
    values_LKd: Tensor,
    window: int | None,
    scale: float | None,
    fused: bool,
) -> Tensor:
    tokens, heads, head_dim = q_THd.shape
    length, kv_heads, _ = keys_LKd.shape
    shared = heads // kv_heads
    q_KGTd = q_THd.view(tokens, kv_heads, shared, head_dim).permute(1, 2, 0, 3)
    keys = keys_LKd.transpose(0, 1)[:, None].expand(-1, shared, -1, -1)
    values = values_LKd.transpose(0, 1)[:, None].expand(-1, shared, -1, -1)
    if not fused:
        tile = queries_in_a_piece(shared, length)
        each = zip(q_KGTd.split(1), keys.split(1), values.split(1), strict=True)
        out_KGTd = torch.cat([_attend_tiles(*one, window, scale, tile) for one in each])
    elif tokens == length and (window is None or window >= length):
        out_KGTd = F.scaled_dot_product_attention(q_KGTd, keys, values, is_causal=True, scale=scale)
    else:
        out_KGTd = _attend_tiles(q_KGTd, keys, values, window, scale)
    return out_KGTd.permute(2, 0, 1, 3).reshape(tokens, -1)


def _attend_tiles(
    q_KGTd: Tensor,
    keys_KGLd: Tensor,
    values_KGLd: Tensor,
    window: int | None,
    scale: float | None,
    tile: int = QUERY_TILE,
) -> Tensor:
    tokens, length = q_KGTd.shape[2], keys_KGLd.shape[2]
    past = length - tokens
    tiles = []
    for start in range(0, tokens, tile):
        stop = min(start + tile, tokens)
        first = 0 if window is None else max(0, past + start - window + 1)
        mask = _mask(past + start, past + stop, first, window, q_KGTd.device)
        seen = slice(first, past + stop)
        q, keys, values = q_KGTd[:, :, start:stop], keys_KGLd[:, :, seen], values_KGLd[:, :, seen]
        tiles.append(F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale))
    return torch.cat(tiles, dim=2)


def _mask(start: int, stop: int, first_key: int, window: int | None, device: torch.device) -> Tensor:
    """The mask of queries at positions start .. stop-1 over keys first_key .. stop-1: True where a query sees a key."""
    query = torch.arange(start, stop, device=device)[:, None]
    key = torch.arange(first_key, stop, device=device)
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def output_projection(
    attention_TX: Tensor, o: Blocks, residual_TD: Tensor, bias: Blocks | None = None, factor: float = 1.0
) -> Tensor:
    """The attention's output projected to the hidden size, times a factor, plus the residual: (T, D)."""
    return plus(residual_TD, with_bias(partial(linear, blocks=o), bias)(attention_TX), factor)


def plus(residual_TD: Tensor, x_TD: Tensor, factor: float) -> Tensor:
    """The residual plus x times a factor."""
    return residual_TD + (x_TD if factor == 1 else x_TD * factor)


def with_bias(product: Callable[[Tensor], Tensor], bias: Blocks | None) -> Callable[[Tensor], Tensor]:
    """A product whose results a bias is added to, if there is one."""
    return product if bias is None else partial(_add_bias, product, torch.cat([*bias]))


def _add_bias(product: Callable[[Tensor], Tensor], bias_N: Tensor, x_TD: Tensor) -> Tensor:
    y_TN = product(x_TD)
    return y_TN.add_(bias_N.to(y_TN.dtype))


# ---------------------------------------------------------------- experts


def router_logits(x_TD: Tensor, router: Blocks, bias_E: Tensor | None = None) -> Tensor:
    """The router's logits (T, E), float32."""
    logits_TE = linear(x_TD.float(), [block.float() for block in router])
    return logits_TE if bias_E is None else logits_TE + bias_E.float()


def router_biases(weights: Mapping[str, Blocks], network: FeedForward) -> tuple[Tensor | None, Tensor | None]:
    """The router's bias (E) as what its logits get, and as what scores get for the choice; None for nothing."""
    bias_E = weights["router_bias"][0] if "router_bias" in weights else None
    return (None, bias_E) if network.router.corrected else (bias_E, None)


def scores(logits_TE: Tensor) -> Tensor:
    """Each expert's probability by the router (E), float32, averaged over the tokens."""
    return logits_TE.softmax(dim=-1).mean(dim=0)


def route(x_TD: Tensor, weights: Mapping[str, Blocks], network: FeedForward) -> tuple[Tensor, Tensor]:
    """The experts of each token and their weights, as `choose_experts` gives them; x is the router's input."""
    added_E, correction_E = router_biases(weights, network)
    return choose_experts(router_logits(x_TD, weights["router"], added_E), network, correction_E)


def choose_experts(
    logits_TE: Tensor, network: FeedForward, bias_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The experts of each token (int64, ascending) and their weights (float32), both (T, k).

    bias_E: what the choice adds to the scores of a corrected router, but not the weights.
    """
    router = network.router
    scores_TE = logits_TE if router.score == "softmax" else logits_TE.sigmoid()
    choice_TE = within_groups(scores_TE if bias_E is None else scores_TE + bias_E, router)
    experts_Tk = choice_TE.topk(network.top_k, dim=-1).indices.sort(dim=-1).values
    chosen_Tk = scores_TE.gather(-1, experts_Tk)
    if router.score == "sigmoid":
        weights_Tk = chosen_Tk / chosen_Tk.sum(-1, keepdim=True) if router.normalised else chosen_Tk
        return experts_Tk, weights_Tk * router.scale
    if router.normalised:  # equals the chosen of a softmax over all, divided by their sum
        weights_Tk = chosen_Tk.softmax(dim=-1)
    else:
        weights_Tk = (chosen_Tk - logits_TE.logsumexp(dim=-1, keepdim=True)).exp()
    return experts_Tk, weights_Tk if router.scale == 1 else weights_Tk * router.scale


def within_groups(choice_TE: Tensor, router: Router) -> Tensor:
    """The scores of the choice, with minus infinity for experts of groups that are not kept."""
    if router.kept_groups == router.groups:
        return choice_TE
    choice_TGe = choice_TE.unflatten(-1, (router.groups, -1))
    scores_TG = choice_TGe.topk(2, dim=-1).values.sum(-1)
    kept_Tk = scores_TG.topk(router.kept_groups, dim=-1).indices
    left_out_TG = torch.ones_like(scores_TG, dtype=torch.bool).scatter_(-1, kept_Tk, False)
    kept_TGe: Tensor = choice_TGe.masked_fill(left_out_TG.unsqueeze(-1), -math.inf)
    return kept_TGe.view_as(choice_TE)


def activated(gate_nI: Tensor, up_nI: Tensor, activation: Activation) -> Tensor:
    """The numbers between the matrices of an expert, (n, I), in the gate's memory; that of up may be used, too."""
    limit = activation.limit
    if limit is None:
        return F.silu(gate_nI, inplace=True).mul_(up_nI)
    for gate_pI, up_pI in zip(gate_nI.split(ACTIVATED_ROWS), up_nI.split(ACTIVATED_ROWS), strict=True):
        gate, up = gate_pI.float().clamp_(max=limit), up_pI.float().clamp_(-limit, limit)
        gate_pI.copy_(gate.mul_((activation.alpha * gate).sigmoid_()).mul_(up.add_(1)))
    return gate_nI


def sorted_by_expert(experts_Tk: Tensor) -> Order:
    """Sort the (token, expert) pairs by expert."""
    order_n = experts_Tk.view(-1).argsort(stable=True)
    return Order(order_n // max(1, experts_Tk.shape[1]), order_n.argsort().view_as(experts_Tk))


def sum_experts(y_nD: Tensor, rows_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    """The weighted sum of each token's expert outputs: (T, D), float32.

    y_nD: the experts' outputs in the rows of `sorted_by_expert`. They are added in ascending order of expert, whatever
    the order in which the experts ran.
    """
    tokens, choices = rows_Tk.shape
    y_TkD = y_nD.index_select(0, rows_Tk.view(-1)).view(tokens, choices, -1)
    total_TD: Tensor = y_TkD[:, 0] * weights_Tk[:, :1]
    for choice in range(1, choices):
        total_TD.addcmul_(y_TkD[:, choice], weights_Tk[:, choice : choice + 1])
    return total_TD


def combine(y_nD: Tensor, rows_Tk: Tensor, weights_Tk: Tensor, residual_TD: Tensor) -> Tensor:
    """The residual plus `sum_experts`, rounded once to the residual's dtype."""
    out_TD = torch.empty_like(residual_TD)
    for tile in tiles_of(out_TD):
        out_TD[tile] = sum_experts(y_nD, rows_Tk[tile], weights_Tk[tile]).add_(residual_TD[tile])
    return out_TD


def lm_head(
    hidden_TD: Tensor, norm_D: Tensor, head: Blocks, eps: float, norm_kind: NormKind = "rms"
) -> Tensor:
    """The logits (T, V), float32, of the tokens that follow the given ones."""
    return linear(norm(hidden_TD, norm_D, eps, norm_kind), head).float()


def likeliest(logits_SV: Tensor) -> Tensor:
    """The likeliest token of each row (S), the first of equal ones; -1 if the largest logit is not finite."""
    largest_S1 = logits_SV.amax(dim=-1, keepdim=True)
    numbers_V = torch.arange(logits_SV.shape[1], device=logits_SV.device)
    first_S = numbers_V.where(logits_SV == largest_S1, logits_SV.shape[1]).amin(dim=-1)
    return first_S.where(largest_S1[:, 0].isfinite(), -1)

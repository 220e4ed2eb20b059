"""The operations of a MoE transformer in torch, as pure functions of tensors on one device: norms, embeddings, logits.

Queries, keys and values are in `qkv_functions.py`, attention in `attention_functions.py`, router and experts in
`expert_functions.py`.

The letters at the end of a tensor's name are its dimensions: T tokens of all sequences together, D hidden size, H
heads, K key-value heads, G heads that share one key-value head, d head size, S sequences, L tokens in the cache, E
experts, k experts per token, n rows of experts' inputs or outputs, I inner size of an expert, V vocabulary, N outputs
of a matrix, X anything else.

A weight matrix W (N, D) comes as row blocks (some of N, D), top to bottom, as a page may hold only some of its rows. If
the files hold the transpose of W, W comes as column blocks (N, some of D) instead, left to right. Each column of such a
block is contiguous. A block may be packed (see `packed_weights.py`). Hidden states have the weights' dtype; operations
that decide accuracy (norms, rotation, softmax, routing, the sum over experts) are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from moesched.models.config import NormKind
from moesched.models.footprint import TOKEN_TILE

from ..products.linear import Blocks, Tensor, linear


def norm(x_TD: Tensor, weight_D: Tensor, eps: float, kind: NormKind = "rms") -> Tensor:
    """Normalise each token and multiply by the weight; returns (T, D), rounded once to the dtype of x.

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
    """Normalise each token by its mean and its variance + eps, and multiply by the weight."""
    return F.layer_norm(x_TD.to(weight_D.dtype), weight_D.shape, weight_D, None, eps).to(x_TD.dtype)


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Divide each token by the root of its mean square + eps, and multiply by the weight."""
    return F.rms_norm(x_TD.to(weight_D.dtype), weight_D.shape, weight_D, eps).to(x_TD.dtype)


def embed(tokens_T: Tensor, embedding_VD: Tensor) -> Tensor:
    """Return the embeddings (T, D) of the tokens."""
    return embedding_VD.index_select(0, tokens_T)


def tiles_of(x_TD: Tensor) -> list[slice]:
    """Return ranges of tokens to compute one after the other, to save temporary memory; on a GPU, a single range."""
    tokens = max(1, len(x_TD))
    size = TOKEN_TILE if x_TD.device.type == "cpu" else tokens
    return [slice(start, start + size) for start in range(0, tokens, size)]


def output_projection(
    attention_TX: Tensor, o: Blocks, residual_TD: Tensor, bias: Blocks | None = None, factor: float = 1.0
) -> Tensor:
    """Project attention's output (T, X) to the hidden size, multiply by a factor, and add the residual: (T, D).

    Args:
        o: the row blocks of the projection matrix (D, X).
        bias: the blocks of the projection's bias; None without one.
    """
    return plus(residual_TD, with_bias(partial(linear, blocks=o), bias)(attention_TX), factor)


def plus(residual_TD: Tensor, x_TD: Tensor, factor: float) -> Tensor:
    """Return residual + factor * x, elementwise."""
    return residual_TD + (x_TD if factor == 1 else x_TD * factor)


def with_bias(product: Callable[[Tensor], Tensor], bias: Blocks | None) -> Callable[[Tensor], Tensor]:
    """Return a function that multiplies as `product` does and adds a bias; `product` itself if `bias` is None."""
    if bias is None:
        return product
    return partial(_add_bias, product, bias[0] if len(bias) == 1 else torch.cat([*bias]))


def _add_bias(product: Callable[[Tensor], Tensor], bias_N: Tensor, x_TD: Tensor) -> Tensor:
    y_TN = product(x_TD)
    return y_TN.add_(bias_N.to(y_TN.dtype))


def lm_head(
    hidden_TD: Tensor, norm_D: Tensor, head: Blocks, eps: float, norm_kind: NormKind = "rms"
) -> Tensor:
    """Apply the last norm and the LM head to hidden states; returns the next tokens' logits (T, V), float32."""
    return linear(norm(hidden_TD, norm_D, eps, norm_kind), head).float()


def likeliest(logits_SV: Tensor) -> Tensor:
    """Return the likeliest token of each row (S), the first of equal ones; -1 where the largest logit is not finite."""
    largest_S1 = logits_SV.amax(dim=-1, keepdim=True)
    numbers_V = torch.arange(logits_SV.shape[1], device=logits_SV.device)
    first_S = numbers_V.where(logits_SV == largest_S1, logits_SV.shape[1]).amin(dim=-1)
    return first_S.where(largest_S1[:, 0].isfinite(), -1)

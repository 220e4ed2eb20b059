"""Computes queries, keys and values in torch: projection, norms and rotation.

Names of tensors end in the letters of their shapes, which `functions.py` explains.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moesched.models.config import ModelConfig
from moesched.models.layers import GroupedAttention

from ..products.linear import Blocks, Tensor, linear
from .functions import norm, rms_norm, tiles_of


def rotary_angles(positions_T: Tensor, attention: GroupedAttention) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines, (T, 1, w) float32 each, that rotate the first w entries of heads by position.

    The first half of each token's sines is negated.
    """
    frequencies_h = rotary_frequencies(attention, positions_T.device)
    return angles(positions_T, frequencies_h, attention.rotary.magnitude)


def rotary_frequencies(attention: GroupedAttention, device: torch.device) -> Tensor:
    """Return the angle in radians by which each rotated pair of a head's entries turns per position: (w / 2)."""
    rotary, head_dim = attention.rotary, attention.head_dim
    width = rotary.turning(head_dim)
    exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    frequencies_h = 1.0 / rotary.theta**exponents
    slowed = rotary.slowed(head_dim)
    return frequencies_h * torch.tensor(slowed, device=device) if slowed else frequencies_h


def angles(positions_T: Tensor, frequencies_h: Tensor, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of `rotary_angles`, given the angle per position of each of the h pairs.

    magnitude: factor on cosines and sines.
    """
    angles_Th = positions_T[:, None].float() * frequencies_h
    halves = angles_Th.cos() * magnitude, angles_Th.sin() * magnitude
    cos_T1w, sin_T1w = (half.repeat(1, 2)[:, None] for half in halves)
    sin_T1w[..., : len(frequencies_h)].neg_()
    return cos_T1w, sin_T1w


def apply_rotary(x_THd: Tensor, cos_T1w: Tensor, sin_T1w: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first w entries of each head by the angles from `rotary_angles`; entries i and i + w/2 make a pair.

    interleaved: True if entries 2i and 2i + 1 make a pair instead; the rotated pair goes to entries i and i + w/2.
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
    """Compute queries (T, H, d), keys and values (T, K, d) from hidden states: norms, projection, clipping, rotation.

    The results are contiguous.

    Args:
        weights: a layer's row blocks by name: attention_norm, qkv, and norms and biases if the layer has them.
        angles: cosines and sines as `rotary_angles` gives them.
        attention: the description of the layer's attention.
    """
    x_TD = norm(hidden_TD, weights["attention_norm"][0], config.norm_eps, config.norm)
    return rotated_heads(linear(x_TD, weights["qkv"]), weights, angles, config, attention)


def qkv_bias(weights: Mapping[str, Blocks], attention: GroupedAttention) -> Tensor | None:
    """Return the joined biases (X) of a layer's queries, keys and values.

    If some of the three have no bias, theirs is zeros; if none has one, the result is None.
    """
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
    """Add biases to the projected x (T, X), split it into queries, keys and values, normalise, clip and rotate them.

    Returns queries (T, H, d), keys and values (T, K, d), all contiguous. x may be overwritten.
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


def _normalise_heads(
    x_TX: Tensor, heads: int, kv_heads: int, weights: tuple[Tensor, Tensor], eps: float
) -> None:
    head = x_TX.shape[1] // (heads + 2 * kv_heads)
    queries, keys = heads * head, (heads + kv_heads) * head
    parts = x_TX[:, :queries], x_TX[:, queries:keys]
    for part, weight in zip(parts, weights, strict=True):
        part.copy_(rms_norm(part.reshape(len(part), -1, len(weight)), weight, eps).flatten(1))

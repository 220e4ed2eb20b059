"""Structs of arguments for native calls, made once for each layer, as they depend only on model and weights."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain, groupby

import torch

from moesched.models.config import ModelConfig, NormKind

from ..native.arguments import Head, Inputs, Layer, Norm
from ..native.kernels import address, matrix_of
from .expert_functions import router_biases
from .kernel_weights import EXPERT_PARTS
from .layer_weights import Blocks, Held, Tensor, Weights, format_of
from .qkv_functions import qkv_bias


class Preparation:
    """Makes the structs of arguments for native calls that depend only on the model and its weights.

    Each method appends to `held` the arrays to which its struct points; the caller keeps this list alive.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def inputs(self, weights: Weights, held: Held) -> Inputs:
        """Return the arguments of C's `moesched_attention_inputs` for a layer; `held` receives their arrays."""
        assert weights.layer is not None, "they are of a layer"
        attention = weights.layer.grouped
        inputs = Inputs(
            hidden=self._config.hidden,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            turning=attention.rotary.turning(attention.head_dim),
            interleaved=attention.rotary.interleaved,
            norm=self._norm(weights["attention_norm"][0], self._config.norm),
            clip=attention.clip or 0.0,
        )
        matrices = [list(blocks) for _, blocks in groupby(weights["qkv"], format_of)]
        held.append(array("q", chain(*((_held(blocks, held), sum(map(len, blocks))) for blocks in matrices))))
        inputs.projections, inputs.weights = len(matrices), address(held[-1])
        bias_X = qkv_bias(weights, attention)
        if bias_X is not None:
            held.append(array("f", bias_X.bfloat16().tolist()))
            inputs.bias = address(held[-1])
        if attention.qk_norm:
            query, key = weights["q_norm"][0], weights["k_norm"][0]
            inputs.query_norm, inputs.query_normed = self._norm(query, "rms"), len(query)
            inputs.key_norm, inputs.key_normed = self._norm(key, "rms"), len(key)
        return inputs

    def layer(self, weights: Weights, held: Held) -> Layer:
        """Return the arguments of C's `moesched_route` and `moesched_moe_layer`; `held` receives their arrays."""
        assert weights.layer is not None, "they are of a layer"
        network = weights.layer.feed_forward
        layer = Layer(
            hidden=self._config.hidden,
            attended_width=weights.layer.attention.attended_width,
            experts=network.experts,
            top_k=network.top_k,
            width=network.intermediate,
            groups=network.router.groups,
            kept_groups=network.router.kept_groups,
            sum_to_one=network.router.normalised,
            scale=network.router.scale,
            residual_factor=self._config.residual_factor,
            shared_width=network.shared,
            shared_scale=network.shared_scale,
            norm=self._norm(weights["ffn_norm"][0], self._config.norm),
        )
        for field, bias_E in zip(("router_bias", "correction"), router_biases(weights, network), strict=True):
            if bias_E is not None:
                held.append(array("f", bias_E.float().tolist()))
                setattr(layer, field, address(held[-1]))
        if "o" in weights:
            layer.output_weights = _held(weights["o"], held)
        if "router" in weights:
            layer.router = _held(weights["router"], held)
        layer.expert_weights = _held_experts(weights, [f"experts.{n}." for n in range(network.experts)], held)
        layer.shared_weights = _held_experts(weights, ["shared_"], held)
        return layer

    def head(self, weights: Weights, held: Held) -> Head:
        """Return the arguments of C's `moesched_logits` for last norm and LM head; `held` receives their arrays."""
        blocks = weights["lm_head"]
        vocabulary = sum(len(block) for block in blocks)
        return Head(
            hidden=self._config.hidden,
            vocabulary=vocabulary,
            factor=self._config.logits_factor,
            norm=self._norm(weights["final_norm"][0], self._config.norm),
            weights=_held(blocks, held),
        )

    def _norm(self, weight_D: Tensor, kind: NormKind) -> Norm:
        in_float32 = weight_D.dtype == torch.float32
        return Norm(weight_D.data_ptr(), in_float32, self._config.norm_eps, kind == "layer")


def _held_experts(weights: Weights, prefixes: Sequence[str], held: Held) -> int | None:
    """Return the address of an array with the matrices of several experts for C; None if a matrix is not loaded.

    Args:
        prefixes: the beginnings of the names of each expert's weights, such as "experts.0.".
        held: list to which the arrays are appended, which must exist as long as C uses them.
    """
    names = [prefix + part for prefix in prefixes for part in EXPERT_PARTS]
    if not all(name in weights for name in names):
        return None
    held.append(array("q", [_held(weights[name], held) for name in names]))
    return address(held[-1])


def _held(blocks: Blocks, held: Held) -> int:
    """Append C's description of a matrix, given as row blocks, to `held`; returns the description's address."""
    held.append(matrix_of(blocks))
    return address(held[-1])

"""Structs of arguments for native calls, made once for each layer, as they depend only on model and weights."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain, groupby

import torch

from moesched.models.config import ModelConfig, NormKind
from moesched.models.networks import FeedForward

from ..native.arguments import ExpertKind, ExpertWeights, Head, Inputs, Layer, Norm, Output
from ..native.kernels import address, matrix_of
from .expert_functions import router_biases
from .layer_weights import Blocks, Held, Tensor, Weights, format_of
from .qkv_functions import qkv_bias
from .seam import COLUMNS, EXPERT_MATRICES


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
        projections = chain(*((_held(blocks, held), sum(map(len, blocks))) for blocks in matrices))
        inputs.projections, inputs.weights = len(matrices), _kept(array("q", projections), held)
        bias_X = qkv_bias(weights, attention)
        if bias_X is not None:
            inputs.bias = _kept(array("f", bias_X.bfloat16().tolist()), held)
        if attention.qk_norm:
            query, key = weights["q_norm"][0], weights["k_norm"][0]
            inputs.query_norm, inputs.query_normed = self._norm(query, "rms"), len(query)
            inputs.key_norm, inputs.key_normed = self._norm(key, "rms"), len(key)
        return inputs

    def output(self, weights: Weights, held: Held) -> Output:
        """Return the arguments of C's `moesched_output_projection`; `held` receives their arrays."""
        assert weights.layer is not None, "they are of a layer"
        output = Output(
            hidden=self._config.hidden,
            attended_width=weights.layer.attention.attended_width,
            residual_factor=self._config.residual_factor,
            output_weights=_held(weights["o"], held),
        )
        if "o_bias" in weights:
            output.output_bias = _held_bias(weights["o_bias"], held)
        return output

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
                setattr(layer, field, _kept(array("f", bias_E.float().tolist()), held))
        if "o" in weights:
            layer.output_weights = _held(weights["o"], held)
        if "o_bias" in weights:
            layer.output_bias = _held_bias(weights["o_bias"], held)
        if "router" in weights:
            layer.router = _held(weights["router"], held)
        experts = [weights.expert(number) for number in range(network.experts)]
        transposed = lies_transposed(experts[0] if experts else weights.expert(None))  # all are stored alike
        layer.kind = expert_kind(network, transposed)
        layer.expert_weights = _held_experts(experts, transposed, held)
        layer.shared_weights = _held_experts([weights.expert(None)], transposed, held)
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


def expert_kind(network: FeedForward, transposed: bool) -> ExpertKind:
    """Return the arguments of C that a layer's experts share; `transposed`: True if matrices are stored transposed."""
    activation = network.activation
    return ExpertKind(transposed, activation.limit or 0.0, activation.alpha)


def lies_transposed(expert: Weights) -> bool:
    """Test if an expert's matrices are stored transposed."""
    return any(format_of(block) == COLUMNS for name in EXPERT_MATRICES for block in expert.get(name, ()))


def expert_weights(expert: Weights, transposed: bool, held: Held) -> ExpertWeights:
    """Return an expert's matrices and biases for C.

    Args:
        transposed: True if matrices are stored transposed.
        held: list to which the arrays and tensors that C reads are appended.
    """
    described = ExpertWeights()
    for name in EXPERT_MATRICES:
        if name not in expert:
            continue
        field = "gate" if name == "gate_up" else name
        blocks = [block.T for block in expert[name]] if transposed else expert[name]
        setattr(described, field, _held(blocks, held))
        if f"{name}_bias" in expert:
            setattr(described, f"{field}_bias", _held_bias(expert[f"{name}_bias"], held))
    return described


def _held_experts(experts: Sequence[Weights], transposed: bool, held: Held) -> int | None:
    """Return the address of an array with the weights of several experts for C; None if an expert lacks a matrix.

    held: list to which the arrays are appended; the caller keeps it as long as C uses them.
    """
    if not all("down" in expert and ("up" in expert or "gate_up" in expert) for expert in experts):
        return None
    described = (bytes(expert_weights(expert, transposed, held)) for expert in experts)
    return _kept(array("q", b"".join(described)), held)


def _held_bias(bias: Sequence[Tensor], held: Held) -> int:
    """Append a bias, given in blocks, to `held` as bfloat16; returns its address."""
    bias_N = (bias[0] if len(bias) == 1 else torch.cat([*bias])).bfloat16().contiguous()
    held.append(bias_N)
    place: int = bias_N.data_ptr()
    return place


def _held(blocks: Blocks, held: Held) -> int:
    """Append C's description of a matrix, given as row blocks, to `held`; returns the description's address."""
    return _kept(matrix_of(blocks), held)


def _kept(numbers: array[int] | array[float], held: Held) -> int:
    """Append numbers to `held`; returns their address."""
    held.append(numbers)
    return address(numbers)

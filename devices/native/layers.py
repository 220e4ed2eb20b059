"""The tasks of a layer as one native call each, for few rows of bfloat16 models on the CPU.

Shapes in names as in `devices/torch/kernels.py`.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from moesched.models.config import ModelConfig

from .arguments import A, Head, Inputs, Layer, LayerWeights, Preparation, Tokens
from .compiled import library
from .kernels import NativeKernels, Tensor, address, are_rows

MOST_PREPARED = 4096
"""Calls whose arguments a micro-batch keeps. Streamed weights have new pointers in every step."""


class Choices(NamedTuple):
    """A router's result: the experts' input; the experts of each token, int64, ascending; their weights; the logits."""

    x_TD: Tensor
    experts_Tk: Tensor
    weights_Tk: Tensor
    logits_TE: Tensor


class StepBuffers:
    """A micro-batch's results, which are overwritten in each layer and step, and the calls that write them.

    Attributes:
        angles: cosines and signed sines (T, 1, d), float32.
        likeliest: of each row, a token.
    """

    def __init__(self, config: ModelConfig, tokens: int) -> None:
        bfloat16 = torch.bfloat16
        self.tokens = tokens
        self.hidden_TD = torch.empty(tokens, config.hidden, dtype=bfloat16)
        self.projected_TD = torch.empty_like(self.hidden_TD)
        self.angles = torch.empty(tokens, 1, config.head_dim), torch.empty(tokens, 1, config.head_dim)
        self.qkv = (
            torch.empty(tokens, config.heads, config.head_dim, dtype=bfloat16),
            torch.empty(tokens, config.kv_heads, config.head_dim, dtype=bfloat16),
            torch.empty(tokens, config.kv_heads, config.head_dim, dtype=bfloat16),
        )
        self.choices = choices_for(config, tokens)
        self.counts = (ctypes.c_int64 * config.experts)()
        self.likeliest = (ctypes.c_int64 * tokens)()
        self.logits_SV = torch.empty(tokens, config.vocabulary // config.ranks)
        self.inputs: dict[int, Inputs] = {}
        self.layers: dict[int, Layer] = {}


def choices_for(config: ModelConfig, tokens: int) -> Choices:
    """Memory for a router's result; the logits are zero, as those of a single expert stay."""
    return Choices(
        torch.empty(tokens, config.hidden, dtype=torch.bfloat16),
        torch.empty(tokens, config.top_k, dtype=torch.int64),
        torch.empty(tokens, config.top_k),
        torch.zeros(tokens, config.experts),
    )


class NativeLayers:
    """Runs a model's tasks for few rows; a row's bits depend on no other row, and on the instruction set alone.

    Roundings to bfloat16 are where torch has them: after each product, norm, rotation and sum.
    """

    def __init__(self, config: ModelConfig, kernels: NativeKernels) -> None:
        self._config = config
        self._kernels = kernels
        self._call = kernels.call
        self._library = library()
        self._prepare = Preparation(config)
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self._frequencies = 1.0 / config.rope_theta**exponents

    def takes(self, x_TD: Tensor, weights: LayerWeights) -> bool:
        """Whether the kernels take these rows, and can read these weights."""
        return self.takes_rows(len(x_TD)) and self.reads(weights)

    def reads(self, weights: LayerWeights) -> bool:
        """Whether the kernels can read these weights: plain row blocks."""
        if weights.plain is None:
            matrices = [blocks for name, blocks in weights.items() if not name.endswith("norm")]
            rows = all(are_rows(each, each[0].shape[1]) for each in matrices)
            weights.plain = rows and not self._config.transposed_down
        return weights.plain

    def takes_rows(self, rows: int) -> bool:
        """Whether the kernels take that many rows."""
        return 0 < rows <= self._kernels.most_rows

    def buffers(self, tokens: int, before: StepBuffers | None = None) -> StepBuffers:
        """Buffers for a step of that many tokens: those of the step before if they fit."""
        if before is not None and before.tokens == tokens:
            return before
        return StepBuffers(self._config, tokens)

    def embed(
        self, buffers: StepBuffers, ids: Sequence[int], positions: Sequence[int], embedding_VD: Tensor
    ) -> None:
        """The tokens' embeddings, and the angles that rotate queries and keys."""
        numbers = array("q", (*ids, *positions))
        cosines, sines = buffers.angles
        arguments = Tokens(
            tokens=len(ids),
            hidden=self._config.hidden,
            head_dim=self._config.head_dim,
            ids=address(numbers),
            positions=address(numbers) + len(ids) * numbers.itemsize,
            embedding=embedding_VD.data_ptr(),
            frequencies=self._frequencies.data_ptr(),
            x=buffers.hidden_TD.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
        )
        self._call(self._library.moesched_embed, arguments)

    def attention_inputs(self, buffers: StepBuffers, hidden_TD: Tensor, weights: LayerWeights) -> None:
        """Norm, projection and rotation: queries, keys and values."""
        inputs = buffers.inputs.get(weights.number)
        if inputs is None:
            inputs = weights.arguments(Inputs, self._prepare.inputs)
            inputs.tokens = buffers.tokens
            inputs.cosines, inputs.sines = (each.data_ptr() for each in buffers.angles)
            inputs.queries, inputs.keys, inputs.values = (each.data_ptr() for each in buffers.qkv)
            _keep(buffers.inputs, weights, inputs)
        inputs.x = hidden_TD.data_ptr()
        self._call(self._library.moesched_attention_inputs, inputs)

    def route(self, hidden_TD: Tensor, weights: LayerWeights) -> Choices:
        """Norm and router, in new tensors: those of another layer may still be needed."""
        choices = choices_for(self._config, len(hidden_TD))
        layer = weights.arguments(Layer, self._prepare.layer)
        layer.tokens, layer.residual, layer.output_weights = len(hidden_TD), hidden_TD.data_ptr(), None
        _write_choices(layer, choices)
        self._call(self._library.moesched_route, layer)
        return choices

    def run(
        self, buffers: StepBuffers, hidden_TD: Tensor, attended_TX: Tensor, weights: LayerWeights
    ) -> dict[int, int]:
        """All that follows attention: the new hidden states; returns the rows of each expert that has any.

        hidden_TD: may be that of the buffers.
        """
        layer = buffers.layers.get(weights.number)
        if layer is None:
            layer = weights.arguments(Layer, self._prepare.layer)
            layer.tokens = buffers.tokens
            layer.projected, layer.out = buffers.projected_TD.data_ptr(), buffers.hidden_TD.data_ptr()
            layer.counts = ctypes.addressof(buffers.counts)
            _write_choices(layer, buffers.choices)
            _keep(buffers.layers, weights, layer)
        layer.residual, layer.attended = hidden_TD.data_ptr(), attended_TX.data_ptr()
        self._call(self._library.moesched_moe_layer, layer)
        return {expert: rows for expert, rows in enumerate(buffers.counts) if rows}

    def combine(self, y_nD: Tensor, rows_Tk: Tensor, weights_Tk: Tensor, residual_TD: Tensor) -> Tensor:
        """The residual plus the weighted sum of each token's experts, whose outputs are rows of y."""
        out_TD = torch.empty_like(residual_TD)
        tensors = (y_nD, rows_Tk, weights_Tk, residual_TD, out_TD)
        sizes = (len(residual_TD), residual_TD.shape[1], rows_Tk.shape[1])
        self._library.moesched_combine(*sizes, *(each.data_ptr() for each in tensors))
        return out_TD

    def logits(
        self, hidden_TD: Tensor, rows: Sequence[int], weights: LayerWeights, into: StepBuffers | None = None
    ) -> tuple[Tensor, list[int]]:
        """The logits (S, V), float32, of some rows, and the likeliest token of each, -1 if its logits are not finite.

        into: overwritten if it has as many rows.
        """
        chosen = array("q", rows)
        head = weights.arguments(Head, self._prepare.head)
        if into is not None and into.tokens == len(rows):
            logits_SV, likeliest = into.logits_SV, into.likeliest
        else:
            logits_SV, likeliest = torch.empty(len(rows), head.vocabulary), (ctypes.c_int64 * len(rows))()
        head.rows, head.x, head.chosen = len(rows), hidden_TD.data_ptr(), address(chosen)
        head.logits, head.likeliest = logits_SV.data_ptr(), ctypes.addressof(likeliest)
        self._call(self._library.moesched_logits, head)
        return logits_SV, list(likeliest)


def _write_choices(layer: Layer, choices: Choices) -> None:
    layer.x, layer.chosen, layer.weights, layer.logits = (each.data_ptr() for each in choices)


def _keep(prepared: dict[int, A], weights: LayerWeights, arguments: A) -> None:
    if len(prepared) >= MOST_PREPARED:
        prepared.clear()
    prepared[weights.number] = arguments

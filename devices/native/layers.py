"""The tasks of a layer as one native call each, for bfloat16 models on the CPU.

Shapes in names as in `devices/torch/kernels.py`.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from moesched.models.config import ModelConfig

from .arguments import A, Head, Inputs, Layer, LayerWeights, Preparation, Tokens
from .compiled import library
from .kernels import NativeKernels, Tensor, address, are_rows

KEPT_ROWS = 128
"""Rows up to which a micro-batch keeps its buffers from layer to layer: a prompt's would take too much memory."""

MOST_PREPARED = 4096
"""Calls whose arguments a micro-batch keeps. Streamed weights have new pointers in every step."""


class Choices(NamedTuple):
    """A router's result: the experts' input; the experts of each token, int64, ascending; their weights; the logits."""

    x_TD: Tensor
    experts_Tk: Tensor
    weights_Tk: Tensor
    logits_TE: Tensor


class StepBuffers:
    """Results of a micro-batch's tasks, each allocated by the first call that writes it, and those calls.

    Few rows have the same ones in each layer and step.
    """

    def __init__(self, config: ModelConfig, tokens: int) -> None:
        self._config = config
        self.tokens = tokens
        self.hidden_TD = torch.empty(tokens, config.hidden, dtype=torch.bfloat16)
        self.counts = (ctypes.c_int64 * config.experts)()
        self.inputs: dict[int, Inputs] = {}
        self.layers: dict[int, Layer] = {}

    @property
    def to_keep(self) -> StepBuffers | None:
        """These buffers for the next layer; None where they would take much memory until then."""
        return self if self.tokens <= KEPT_ROWS else None

    @cached_property
    def projected_TD(self) -> Tensor:
        """The hidden states after the output projection."""
        return torch.empty_like(self.hidden_TD)

    @cached_property
    def angles(self) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines (T, 1, d), float32."""
        shape = self.tokens, 1, self._config.head_dim
        return torch.empty(shape), torch.empty(shape)

    @cached_property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (T, H, d), keys and values (T, K, d)."""
        config = self._config
        queries, keys, values = (
            torch.empty(self.tokens, heads, config.head_dim, dtype=torch.bfloat16)
            for heads in (config.heads, config.kv_heads, config.kv_heads)
        )
        return queries, keys, values

    @cached_property
    def choices(self) -> Choices:
        """The router's result."""
        return choices_for(self._config, self.tokens)

    @cached_property
    def likeliest(self) -> ctypes.Array[ctypes.c_int64]:
        """The likeliest token of each row."""
        return (ctypes.c_int64 * self.tokens)()

    @cached_property
    def logits_SV(self) -> Tensor:
        """The logits of each row, float32."""
        return torch.empty(self.tokens, self._config.vocabulary // self._config.ranks)


def choices_for(config: ModelConfig, tokens: int) -> Choices:
    """Memory for a router's result; the logits are zero, as those of a single expert stay."""
    return Choices(
        torch.empty(tokens, config.hidden, dtype=torch.bfloat16),
        torch.empty(tokens, config.top_k, dtype=torch.int64),
        torch.empty(tokens, config.top_k),
        torch.zeros(tokens, config.experts),
    )


class NativeLayers:
    """Runs a model's tasks; a row's bits depend on no other row, and on the instruction set alone.

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

    def attention_inputs(
        self, buffers: StepBuffers, hidden_TD: Tensor, angles: tuple[Tensor, Tensor], weights: LayerWeights
    ) -> None:
        """Norm, projection and rotation: queries, keys and values.

        angles: as `embed` wrote them, the same in all calls with these buffers.
        """
        inputs = buffers.inputs.get(weights.number)
        if inputs is None:
            inputs = weights.arguments(Inputs, self._prepare.inputs)
            inputs.tokens = buffers.tokens
            inputs.cosines, inputs.sines = (each.data_ptr() for each in angles)
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

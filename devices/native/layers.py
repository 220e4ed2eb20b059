"""The tasks of a layer as one native call each, for bfloat16 models on the CPU.

Shapes in names as in `devices/torch/kernels.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moesched.models.config import ModelConfig

from .arguments import Head, Inputs, Layer, LayerWeights, Preparation, Tokens
from .buffers import Choices, StepBuffers, choices_for
from .calls import EmbeddingCall, HeadCall
from .compiled import library
from .kernels import NativeKernels, Tensor, address, are_rows, check

MOST_SHAPES = 4
"""Numbers of tokens whose buffers a micro-batch keeps."""


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
        attention = config.attention
        exponents = torch.arange(0, attention.head_dim, 2, dtype=torch.float32) / attention.head_dim
        self._frequencies = 1.0 / attention.rope_theta**exponents

    def takes(self, x_TD: Tensor, weights: LayerWeights) -> bool:
        """Whether the kernels take these rows, and can read these weights."""
        return self.takes_rows(len(x_TD)) and self.reads(weights)

    def reads(self, weights: LayerWeights) -> bool:
        """Whether the kernels can read these weights: plain row blocks."""
        if weights.plain is None:
            matrices = [blocks for name, blocks in weights.items() if not name.endswith("norm")]
            rows = all(are_rows(each, each[0].shape[1]) for each in matrices)
            weights.plain = rows and not self._config.routed.transposed_down
        return weights.plain

    def takes_rows(self, rows: int) -> bool:
        """Whether the kernels take that many rows."""
        return 0 < rows <= self._kernels.most_rows

    def buffers(self, tokens: int, shapes: dict[int, StepBuffers] | None = None) -> StepBuffers:
        """Buffers for a step of that many tokens: those of an earlier step if `shapes`, which keeps them, has some."""
        shapes = {} if shapes is None else shapes
        buffers = shapes.get(tokens) or StepBuffers(self._config, tokens)
        if buffers.to_keep and tokens not in shapes:
            if len(shapes) == MOST_SHAPES:
                del shapes[next(iter(shapes))]
            shapes[tokens] = buffers
        return buffers

    def embed(
        self, buffers: StepBuffers, ids: Sequence[int], positions: Sequence[int], embedding_VD: Tensor
    ) -> None:
        """The tokens' embeddings, and the angles that rotate queries and keys."""
        call = buffers.embedding
        if call is None:
            call = buffers.embedding = self._embedding_call(buffers)
        call(ids, positions, embedding_VD)

    def _embedding_call(self, buffers: StepBuffers) -> EmbeddingCall:
        cosines, sines = buffers.angles
        arguments = Tokens(
            tokens=buffers.tokens,
            hidden=self._config.hidden,
            head_dim=self._config.attention.head_dim,
            frequencies=self._frequencies.data_ptr(),
            x=buffers.hidden_TD.data_ptr(),
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
        )
        return EmbeddingCall(self._kernels, arguments)

    def attention_inputs(
        self, buffers: StepBuffers, hidden_TD: Tensor, angles: tuple[Tensor, Tensor], weights: LayerWeights
    ) -> None:
        """Norm, projection and rotation: queries, keys and values.

        hidden_TD, angles: with those of the buffers, the call is prepared once.
        """
        own = hidden_TD is buffers.hidden_TD and angles is buffers.angles
        call = buffers.inputs.get(weights.number) if own else None
        if call is None:
            inputs = self._inputs(buffers, hidden_TD, angles, weights)
            call = self._kernels.bound(self._library.moesched_attention_inputs, inputs)
            if own:
                buffers.inputs.keep(weights, call)
        check(call())

    def _inputs(
        self, buffers: StepBuffers, hidden_TD: Tensor, angles: tuple[Tensor, Tensor], weights: LayerWeights
    ) -> Inputs:
        inputs = weights.arguments(Inputs, self._prepare.inputs)
        inputs.tokens, inputs.x = buffers.tokens, hidden_TD.data_ptr()
        inputs.cosines, inputs.sines = (each.data_ptr() for each in angles)
        inputs.queries, inputs.keys, inputs.values = (each.data_ptr() for each in buffers.qkv)
        return inputs

    def route(self, hidden_TD: Tensor, weights: LayerWeights, into: Choices | None = None) -> Choices:
        """Norm and router.

        into: memory for the result, of as many tokens; new tensors by default.
        """
        choices = choices_for(self._config, len(hidden_TD)) if into is None else into
        layer = weights.arguments(Layer, self._prepare.layer)
        layer.tokens, layer.residual, layer.output_weights = len(hidden_TD), hidden_TD.data_ptr(), None
        _write_choices(layer, choices)
        self._call(self._library.moesched_route, layer)
        return choices

    def run(
        self, buffers: StepBuffers, hidden_TD: Tensor, attended_TX: Tensor, weights: LayerWeights
    ) -> dict[int, int]:
        """All that follows attention: the new hidden states; returns the rows of each expert that has any.

        hidden_TD, attended_TX: with those of the buffers, the call is prepared once.
        """
        own = hidden_TD is buffers.hidden_TD and attended_TX is buffers.attended_TX
        call = buffers.layers.get(weights.number) if own else None
        if call is None:
            layer = self._layer(buffers, hidden_TD, attended_TX, weights)
            call = self._kernels.bound(self._library.moesched_moe_layer, layer)
            if own:
                buffers.layers.keep(weights, call)
        check(call())
        return {expert: rows for expert, rows in enumerate(buffers.counts) if rows}

    def _layer(
        self, buffers: StepBuffers, hidden_TD: Tensor, attended_TX: Tensor, weights: LayerWeights
    ) -> Layer:
        layer = weights.arguments(Layer, self._prepare.layer)
        layer.tokens, layer.residual = buffers.tokens, hidden_TD.data_ptr()
        layer.attended, layer.projected = attended_TX.data_ptr(), buffers.projected_TD.data_ptr()
        layer.out, layer.counts = buffers.hidden_TD.data_ptr(), address(buffers.counts)
        _write_choices(layer, buffers.choices)
        return layer

    def combine(
        self, y_nD: Tensor, rows_Tk: Tensor, weights_Tk: Tensor, residual_TD: Tensor, out_TD: Tensor
    ) -> None:
        """Write the residual plus the weighted sum of each token's experts, whose outputs are rows of y.

        out_TD: may be the residual.
        """
        tensors = (y_nD, rows_Tk, weights_Tk, residual_TD, out_TD)
        sizes = (len(residual_TD), residual_TD.shape[1], rows_Tk.shape[1])
        self._library.moesched_combine(*sizes, *(each.data_ptr() for each in tensors))

    def logits(
        self, hidden_TD: Tensor, rows: Sequence[int], weights: LayerWeights
    ) -> tuple[Tensor, list[int]]:
        """The logits (R, V), float32, of some rows, and the likeliest token of each: -1 if they are not finite."""
        call = HeadCall(self._kernels, weights.arguments(Head, self._prepare.head), hidden_TD, rows)
        likeliest = call()
        return call.logits_RV, likeliest

    def all_logits(self, buffers: StepBuffers, weights: LayerWeights) -> tuple[Tensor, list[int]]:
        """The same of all hidden states of the buffers, in memory that the next call overwrites."""
        call = buffers.heads.get(weights.number)
        if call is None:
            head = weights.arguments(Head, self._prepare.head)
            call = HeadCall(self._kernels, head, buffers.hidden_TD, range(buffers.tokens))
            buffers.heads[weights.number] = call
        likeliest = call()
        return call.logits_RV, likeliest


def _write_choices(layer: Layer, choices: Choices) -> None:
    layer.x, layer.chosen, layer.weights, layer.logits = (each.data_ptr() for each in choices)

"""The native library's kernels for a bfloat16 model on the CPU: each operation is one call into C.

Roundings to bfloat16 are where torch has them: after each product, norm, rotation and sum.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from functools import partial

import torch

from moesched.models.networks import FeedForward

from ..native.arguments import Inputs, Layer, Output
from ..native.compiled import library
from ..native.kernels import address, no_memory, numbers
from .layer_weights import Tensor, Weights
from .native_ends import NATIVE_ENDS
from .native_experts import NATIVE_EXPERTS, unknown_experts
from .native_kernel import BFLOAT16, NativeMemoryKernel, hidden_states
from .native_products import MOST_COLUMN_ROWS, NATIVE_PRODUCTS
from .seam import COLUMNS, Bound, Case, ExpertOrder, RouterOutput
from .workspace import Workspace


class NativeAttentionInputs(NativeMemoryKernel):
    """Normalises hidden states, projects them to queries, keys and values, and rotates queries and keys."""

    operation = "attention_inputs"

    def bind(self, case: Case, weights: Weights, memory: Workspace) -> Bound:
        attention = case.attention
        queries, keys, values = (
            memory.tensor(name, memory.rows, heads, attention.head_dim, dtype=BFLOAT16)
            for name, heads in (
                ("queries", attention.heads),
                ("keys", attention.kv_heads),
                ("values", attention.kv_heads),
            )
        )
        inputs = weights.arguments(Inputs, self._prepare.inputs)
        inputs.tokens = memory.rows
        inputs.queries, inputs.keys, inputs.values = (each.data_ptr() for each in (queries, keys, values))
        run = self._bound(library().moesched_attention_inputs, inputs)
        return _AttentionInputs(run, inputs, (queries, keys, values))


class _AttentionInputs:
    """A bound kernel of the native library: norm of hidden states, projection to queries, keys and values, rotation.

    The addresses of its inputs are written to the library's arguments only if the inputs are other tensors than before.
    """

    __slots__ = ("_angles", "_arguments", "_hidden_TD", "_qkv", "_run")

    def __init__(self, run: Callable[[], int], arguments: Inputs, qkv: tuple[Tensor, Tensor, Tensor]) -> None:
        self._run = run
        self._arguments = arguments
        self._qkv = qkv
        self._hidden_TD: Tensor | None = None
        self._angles: tuple[Tensor, Tensor] | None = None

    def __call__(self, hidden_TD: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        if hidden_TD is not self._hidden_TD or angles is not self._angles:
            self._hidden_TD, self._angles = hidden_TD, angles
            self._arguments.x = hidden_TD.data_ptr()
            self._arguments.cosines, self._arguments.sines = (each.data_ptr() for each in angles)
        if self._run():
            raise no_memory()
        return self._qkv


class NativeOutputProjection(NativeMemoryKernel):
    """Projects attention's output to the hidden size, and adds the residual."""

    operation = "output_projection"

    def bind(self, case: Case, weights: Weights, memory: Workspace) -> Bound:
        projected_TD = memory.tensor("projected", memory.rows, self._config.hidden, dtype=BFLOAT16)
        output = weights.arguments(Output, self._prepare.output)
        output.tokens, output.projected = memory.rows, projected_TD.data_ptr()
        run = self._bound(library().moesched_output_projection, output)
        return partial(_project, run, output, projected_TD)


def _project(
    run: Callable[[], int], output: Output, projected_TD: Tensor, attended_TX: Tensor, residual_TD: Tensor
) -> Tensor:
    output.attended, output.residual = attended_TX.data_ptr(), residual_TD.data_ptr()
    if run():
        raise no_memory()
    return projected_TD


class NativeRoute(NativeMemoryKernel):
    """Normalises hidden states, computes the router's logits, and chooses each token's experts with their weights."""

    operation = "route"

    def bind(self, case: Case, weights: Weights, memory: Workspace) -> Bound:
        choices = choices_in(memory, self._config.hidden, case.network)
        layer = weights.arguments(Layer, self._prepare.layer)
        layer.tokens, layer.output_weights = memory.rows, None
        scores_TE = _write_choices(layer, choices, memory, case)
        counts, order = numbers(case.network.experts), order_in(memory, case.network)
        layer.counts = address(counts)
        layer.sorted, layer.rows = (each.data_ptr() for each in order)
        run = self._bound(library().moesched_route, layer)
        return partial(_route, run, layer, choices._replace(order=order), (scores_TE, counts))


def _route(
    run: Callable[[], int], layer: Layer, choices: RouterOutput, held: object, hidden_TD: Tensor
) -> RouterOutput:
    layer.residual = hidden_TD.data_ptr()
    if run():
        raise no_memory()
    return choices


class NativeCombine(NativeMemoryKernel):
    """Adds up each token's expert outputs, weighted by the router, and the residual."""

    operation = "combine"

    def bind(self, case: Case, weights: object, memory: Workspace) -> Bound:
        return partial(_combine, hidden_states(memory, self._config))


def _combine(
    out_TD: Tensor, y_nD: Tensor, rows_Tk: Tensor, weights_Tk: Tensor, residual_TD: Tensor
) -> Tensor:
    tensors = (y_nD, rows_Tk, weights_Tk, residual_TD, out_TD)
    sizes = (len(residual_TD), residual_TD.shape[1], rows_Tk.shape[1])
    library().moesched_combine(*sizes, *(each.data_ptr() for each in tensors))
    return out_TD


class NativeMoELayer(NativeMemoryKernel):
    """Computes all that follows attention in a layer, from output projection to sum over experts, in one call of C."""

    operation = "moe_layer"

    def refusal(self, case: Case) -> str:
        """Return the reason why this kernel refuses a case; empty if it takes the case.

        Refused are all cases that `NativeKernel` refuses, and experts that C cannot run (see `unknown_experts`). Layers
        with a shared expert are refused unless the experts have three matrices, the activation SiLU, and no biases. If
        matrices are stored transposed, cases with more than 16 rows are refused, too, and so are experts whose
        activation does not clip gate and up (`Activation.limit` is None).
        """
        network = case.network
        if COLUMNS in case.formats:
            if network.is_usual or case.rows > MOST_COLUMN_ROWS:
                return "torch multiplies by matrices that are stored transposed"
            case = case._replace(formats=case.formats - {COLUMNS})
        if network.shared and not network.is_usual:
            return "its networks of every token have SiLU"
        return super().refusal(case) or unknown_experts(case)

    def bind(self, case: Case, weights: Weights, memory: Workspace) -> Bound:
        network = case.network
        hidden_TD, choices = (
            hidden_states(memory, self._config),
            choices_in(memory, self._config.hidden, network),
        )
        projected_TD = memory.tensor("projected", *hidden_TD.shape, dtype=BFLOAT16)
        counts = numbers(network.experts)
        layer = weights.arguments(Layer, self._prepare.layer)
        layer.tokens, layer.projected = memory.rows, projected_TD.data_ptr()
        layer.out, layer.counts = hidden_TD.data_ptr(), address(counts)
        scores_TE = _write_choices(layer, choices, memory, case)
        run = self._bound(library().moesched_moe_layer, layer)
        return _MoELayer(run, layer, hidden_TD, choices, (projected_TD, scores_TE), counts)


class _MoELayer:
    """A bound kernel of the native library for all that follows attention in a layer.

    The addresses of its inputs are written to the library's arguments only if the inputs are other tensors than before.
    """

    __slots__ = (
        "_attended_TX",
        "_between",
        "_counts",
        "_experts_Tk",
        "_layer",
        "_out_TD",
        "_residual_TD",
        "_run",
    )

    def __init__(
        self,
        run: Callable[[], int],
        layer: Layer,
        out_TD: Tensor,
        choices: RouterOutput,
        between: tuple[Tensor | None, ...],
        counts: array[int],
    ) -> None:
        self._run = run
        self._layer = layer
        self._out_TD = out_TD
        self._between = choices, between  # which C writes
        self._experts_Tk = choices.experts_Tk
        self._counts = counts
        self._attended_TX: Tensor | None = None
        self._residual_TD: Tensor | None = None

    def __call__(self, attended_TX: Tensor, residual_TD: Tensor) -> tuple[Tensor, Tensor, dict[int, int]]:
        if attended_TX is not self._attended_TX or residual_TD is not self._residual_TD:
            self._attended_TX, self._residual_TD = attended_TX, residual_TD
            self._layer.attended, self._layer.residual = attended_TX.data_ptr(), residual_TD.data_ptr()
        if self._run():
            raise no_memory()
        counts = {expert: rows for expert, rows in enumerate(self._counts) if rows}
        return self._out_TD, self._experts_Tk, counts


def choices_in(memory: Workspace, hidden: int, network: FeedForward) -> RouterOutput:
    """Reserve tensors for a router's result in a micro-batch's memory.

    The logits begin as zeros; in a layer with a single expert, which has no router, they stay zeros.

    Args:
        memory: the micro-batch's memory, for `memory.rows` tokens.
        hidden: the hidden size.
        network: the layer's feed-forward network, which has the numbers of experts and of experts per token.
    """
    rows = memory.rows
    return RouterOutput(
        memory.tensor("experts' input", rows, hidden, dtype=BFLOAT16),
        memory.tensor("experts", rows, network.top_k, dtype=torch.int64),
        memory.tensor("weights", rows, network.top_k, dtype=torch.float32),
        memory.tensor("router logits", rows, network.experts, dtype=torch.float32, zero=True),
    )


def order_in(memory: Workspace, network: FeedForward) -> ExpertOrder:
    """Reserve tensors for the order of rows by expert in a micro-batch's memory."""
    shape = memory.rows, network.top_k
    return ExpertOrder(
        memory.tensor("tokens by expert", math.prod(shape), dtype=torch.int64),
        memory.tensor("rows by expert", *shape, dtype=torch.int64),
    )


def _write_choices(layer: Layer, choices: RouterOutput, memory: Workspace, case: Case) -> Tensor | None:
    """Write the addresses of the tensors for a router's result to the arguments of a native call.

    Returns memory for the scores of a sigmoid router, which C uses and the caller must keep; None for softmax.

    Args:
        layer: the arguments of the native call.
        choices: the tensors for the router's result.
        memory: the micro-batch's memory, which also holds the scores.
    """
    layer.x, layer.chosen, layer.weights, layer.logits = (each.data_ptr() for each in choices[:4])
    network = case.network
    if network.router.score == "softmax":
        return None
    scores_TE = memory.tensor("router scores", memory.rows, network.experts, dtype=torch.float32)
    layer.scores = scores_TE.data_ptr()
    return scores_TE


NATIVE = (
    NativeAttentionInputs,
    NativeOutputProjection,
    NativeRoute,
    *NATIVE_EXPERTS,
    NativeCombine,
    NativeMoELayer,
    *NATIVE_ENDS,
    *NATIVE_PRODUCTS,
)

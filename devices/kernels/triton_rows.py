"""The kernels in Triton as rows of the table: for GPUs from compute capability 8.0 on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from moesched.models.layers import FeedForward

from . import triton_functions as functions
from .kernel_weights import EXPERT_PARTS
from .layer_weights import Tensor, Weights
from .resources import Resources
from .seam import ROWS, Bound, Case, Kernel, Routed
from .triton_code import INTERPRETED
from .triton_functions import Matrix, Order

ALIGNED_BYTES = 16
"""Rows of matrices begin at multiples of this, so that a GPU reads them in its widest loads."""
CAPABILITY = (8, 0)
MOST_ROWS = 512
"""Most rows: each tile of 16 reads the weights again, so that torch's products are faster for a prompt."""
DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}


class TritonKernel(Kernel):
    """A kernel whose rows depend on no others: its tiles are fixed, and every sum has one order."""

    name = "triton"
    takes = f"up to {MOST_ROWS} rows by plain weights on GPUs of compute capability 8.0 and above"
    independent = True

    def __init__(self, resources: Resources) -> None:
        self._config = resources.config
        self._indices = resources.indices

    @classmethod
    def problem(cls) -> str | None:
        """The reason why this machine's GPU does not run it."""
        if INTERPRETED or (torch.cuda.is_available() and torch.cuda.get_device_capability() >= CAPABILITY):
            return None
        return "there is no GPU of compute capability 8.0 or above"

    def refusal(self, case: Case) -> str:
        """Refuses the CPU, other formats than row blocks, and rows that are not aligned."""
        if case.device == "cpu" and not INTERPRETED:
            return "it is for GPUs"
        if case.rows > MOST_ROWS:
            return f"it takes up to {MOST_ROWS} rows"
        if not case.formats <= {ROWS}:
            return "it takes row blocks"
        if case.dtype not in DTYPES:
            return f"it computes in {', '.join(DTYPES)}"
        widths = [self._config.hidden]
        if case.layer is not None:
            widths += case.layer.attention.attended_width, case.layer.feed_forward.intermediate
        if any(width * DTYPES[case.dtype] % ALIGNED_BYTES for width in widths):
            return f"its rows are multiples of {ALIGNED_BYTES} bytes"
        return ""

    def _matrix(self, weights: Weights, *names: str) -> Matrix:
        return functions.table_of([weights[name] for name in names], self._indices)

    def _experts(self, network: FeedForward, weights: Weights, prefixes: Sequence[str], top_k: int) -> Bound:
        """Bind experts, whose matrices have these prefixes before gate, up and down: (x_TD, order, y_nD) -> None."""
        gates, ups, downs = (
            self._matrix(weights, *[prefix + part for prefix in prefixes]) for part in EXPERT_PARTS
        )
        return partial(
            functions.run_experts,
            gates=gates,
            ups=ups,
            downs=downs,
            intermediate=network.intermediate,
            top_k=top_k,
        )


class TritonAttentionInputs(TritonKernel):
    """Norm, projection and rotation."""

    operation = "attention_inputs"

    def refusal(self, case: Case) -> str:
        """Refuses norms of whole projections, and pairs of neighbours, as well."""
        assert case.layer is not None, "it is in a layer"
        attention = case.layer.grouped
        if attention.interleaved:
            return super().refusal(case) or "it rotates the halves of a head"
        whole = attention.qk_norm not in (None, "head")
        return super().refusal(case) or ("it norms heads one by one" if whole else "")

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        """Bind norm, projection and rotation: (hidden_TD, angles) -> q_THd, k_TKd, v_TKd."""
        assert case.layer is not None, "it is in a layer"
        attention = case.layer.grouped
        return partial(
            functions.attention_inputs,
            norm_D=weights["attention_norm"][0],
            matrix=self._matrix(weights, "qkv"),
            head_norms=(weights["q_norm"][0], weights["k_norm"][0]) if attention.qk_norm else None,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            eps=self._config.norm_eps,
            clip=attention.clip,
            layer_norm=self._config.norm == "layer",
        )


class TritonAttention(TritonKernel):
    """Attention of one new token for each sequence, over a KV cache in blocks."""

    operation = "attention"
    takes = "decode steps on GPUs of compute capability 8.0 and above"

    def refusal(self, case: Case) -> str:
        """Refuses prompts as well."""
        return super().refusal(case) or ("" if case.decodes else "it takes one new token for each sequence")

    def bind(self, case: Case, weights: object, memory: object) -> Bound:
        """Bind attention over the KV cache: (qkv, cached, step) -> attended_TX."""
        return partial(_attend, self._indices)


def _attend(
    indices: Callable[[Sequence[int]], Tensor], qkv: tuple[Tensor, Tensor, Tensor], cached: Any, step: Any
) -> Tensor:
    keys, values, block, window = cached.addresses
    longest = max(step.in_blocks.lengths)
    table = step.table(indices)
    return functions.attend(qkv, keys, values, table, longest=longest, block=block, window=window or longest)


class TritonOutputProjection(TritonKernel):
    """Output projection and residual."""

    operation = "output_projection"

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        """Bind the output projection with the residual: (attended_TX, residual_TD) -> hidden_TD."""
        return partial(functions.output_projection, matrix=self._matrix(weights, "o"))


class TritonRoute(TritonKernel):
    """Norm, router, and the choice of experts."""

    operation = "route"

    def refusal(self, case: Case) -> str:
        """Refuses a network without a router as well."""
        assert case.layer is not None, "it is in a layer"
        return super().refusal(case) or ("" if case.layer.feed_forward.experts > 1 else "it takes a router")

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        """Bind norm, router and the choice of experts: (hidden_TD) -> Routed."""
        assert case.layer is not None, "it is in a layer"
        network = case.layer.feed_forward
        return partial(
            functions.route,
            norm_D=weights["ffn_norm"][0],
            matrix=self._matrix(weights, "router"),
            experts=network.experts,
            top_k=network.top_k,
            eps=self._config.norm_eps,
            layer_norm=self._config.norm == "layer",
            sum_to_one=network.weights_sum_to_one,
        )


class TritonExpert(TritonKernel):
    """One expert on its rows."""

    operation = "expert"

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        """Bind one expert: (x_nD, y_nD) -> None."""
        assert case.layer is not None, "it is in a layer"
        run = self._experts(case.layer.feed_forward, weights, [""], top_k=1)
        return partial(_run_alone, run, self._indices)


def _run_alone(run: Bound, indices: Callable[[Sequence[int]], Tensor], x_nD: Tensor, y_nD: Tensor) -> None:
    run(x_nD, Order(None, None, indices([0, len(x_nD)])), y_nD)


class TritonCombine(TritonKernel):
    """Weighted sum of the experts' outputs, and the residual."""

    operation = "combine"

    def bind(self, case: Case, weights: object, memory: object) -> Bound:
        """Bind the weighted sum of the experts' outputs: (y_nD, rows_Tk, weights_Tk, residual_TD) -> hidden_TD."""
        return functions.combine


class TritonMoELayer(TritonRoute):
    """All that follows attention, in six launches; the host need not know the routing before its end."""

    operation = "moe_layer"

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        """Bind all that follows attention: (attended_TX, hidden_TD) -> hidden_TD, experts_Tk, None."""
        assert case.layer is not None, "it is in a layer"
        network = case.layer.feed_forward
        prefixes = [f"experts.{expert}." for expert in range(network.experts)]
        experts = self._experts(network, weights, prefixes, network.top_k)
        project = partial(functions.output_projection, matrix=self._matrix(weights, "o"))
        return partial(_moe_layer, project, super().bind(case, weights, memory), experts, network.experts)


def _moe_layer(
    project: Bound, router: Bound, run: Bound, experts: int, attended_TX: Tensor, hidden_TD: Tensor
) -> tuple[Tensor, Tensor, None]:
    hidden_TD = project(attended_TX, hidden_TD)
    routed: Routed = router(hidden_TD)
    order = functions.sort_rows(routed.experts_Tk, experts)
    y_nD = hidden_TD.new_empty(routed.experts_Tk.numel(), hidden_TD.shape[1])
    run(routed.x_TD, order, y_nD)
    assert order.rows_Tk is not None, "it is sorted"
    return functions.combine(y_nD, order.rows_Tk, routed.weights_Tk, hidden_TD), routed.experts_Tk, None


TRITON = (
    TritonAttentionInputs,
    TritonAttention,
    TritonOutputProjection,
    TritonRoute,
    TritonExpert,
    TritonCombine,
    TritonMoELayer,
)

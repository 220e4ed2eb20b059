"""The kernels of MLX. Arrays are lazy: a bound kernel returns them without evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from moesched.models.config import ModelConfig

from . import mlx_functions as functions
from .mlx_functions import MANY_ROWS, Array, Rows, Stack
from .mlx_weights import Arrays
from .seam import OPERATIONS, STACK, Bound, Case, Kernel, RouterOutput
from .table import KernelTable


class MlxKernel(Kernel):
    """The base of kernels in MLX, for any device.

    Args:
        table: the kernel table, by which a kernel finds the kernels of other operations that it calls.
    """

    name = "mlx"
    takes = "everything"

    def __init__(self, config: ModelConfig, table: KernelTable) -> None:
        self._config = config
        self._table = table

    def refusal(self, case: Case) -> str:
        """Return "", as this kernel takes every case of its operation."""
        return ""


class MlxEmbed(MlxKernel):
    """Looks up the embeddings of tokens, and computes cosines and sines of rotary angles for their positions."""

    operation = "embed"

    def bind(self, case: Case, weights: Arrays, memory: object) -> Bound:
        return partial(self._embed, weights["embedding"][0])

    def _embed(
        self, embedding_VD: Array, ids: list[int], positions: npt.NDArray[np.int64], _: object
    ) -> tuple[Array, tuple[Array, Array]]:
        angles = functions.rotary_angles(mx.array(positions), self._config.attention)
        return embedding_VD[mx.array(ids)], angles


class MlxAttentionInputs(MlxKernel):
    """Normalises hidden states, projects them to queries, keys and values, and rotates queries and keys."""

    operation = "attention_inputs"

    def bind(self, case: Case, weights: Arrays, memory: object) -> Bound:
        names = ("attention_norm", "qkv", "q_norm", "k_norm")
        arrays = {name: weights[name] for name in names if name in weights}
        return partial(functions.project_qkv, weights=arrays, config=self._config, attention=case.attention)


class MlxAttention(MlxKernel):
    """Stores the keys and values of new tokens in the KV cache, and attends from the new tokens over the cache."""

    operation = "attention"

    def bind(self, case: Case, weights: object, memory: object) -> Bound:
        return partial(_attend, case.attention.window)


def _attend(window: int | None, qkv: tuple[Array, Array, Array], cached: Any, step: Any) -> Array:
    q_THd, k_TKd, v_TKd = qkv
    return functions.attention(q_THd, cached.extended(step, k_TKd, v_TKd), window)


class MlxOutputProjection(MlxKernel):
    """Projects attention's output to the hidden size, and adds the residual."""

    operation = "output_projection"

    def bind(self, case: Case, weights: Arrays, memory: object) -> Bound:
        return partial(_project_output, weights["o"])


def _project_output(blocks: Sequence[Array], attended_TX: Array, residual_TD: Array) -> Array:
    return residual_TD + functions.linear(attended_TX, blocks)


class MlxRoute(MlxKernel):
    """Normalises hidden states, computes the router's logits, and chooses each token's experts with their weights."""

    operation = "route"

    def bind(self, case: Case, weights: Arrays, memory: object) -> Bound:
        network, config = case.network, self._config
        norm = partial(functions.norm, weight_D=weights["ffn_norm"][0], eps=config.norm_eps, kind=config.norm)
        if network.experts == 1:
            return partial(_route_to_one, norm)
        bias_E = weights["router_bias"][0] if network.router.corrected else None
        choose = partial(functions.choose_experts, network=network, bias_E=bias_E)
        return partial(_route, norm, weights["router"], choose)


def _route_to_one(norm: Callable[[Array], Array], hidden_TD: Array) -> RouterOutput:
    x_TD = norm(hidden_TD)
    ones_T1 = mx.ones((len(x_TD), 1))
    return RouterOutput(x_TD, mx.zeros((len(x_TD), 1), dtype=mx.uint32), ones_T1, ones_T1)


def _route(
    norm: Callable[[Array], Array],
    router: Sequence[Array],
    choose: Callable[[Array], tuple[Array, Array]],
    hidden_TD: Array,
) -> RouterOutput:
    x_TD = norm(hidden_TD)
    logits_TE = functions.router_logits(x_TD, router)
    return RouterOutput(x_TD, *choose(logits_TE), logits_TE)


class GatheredExperts(MlxKernel):
    """Runs experts whose weights are stacked in a few arrays, by kernels that gather each row's matrices."""

    operation = "experts"
    name = "mlx gathered"
    takes = "float32, and on Metal bfloat16"
    independent = True

    def refusal(self, case: Case) -> str:
        """Return the reason why bfloat16 on a CPU is refused; empty for all other cases."""
        return _not_gathered(case)

    def bind(self, case: Case, weights: Arrays, memory: object) -> Bound:
        return partial(functions.gathered_experts, _stack(weights))


def _not_gathered(case: Case) -> str:
    by_processor = case.device == "cpu" and case.dtype != "float32"
    return "on a processor MLX gathers float32 matrices only" if by_processor else ""


class ExpertsOneByOne(MlxKernel):
    """Runs the experts of a stack one after the other, with three products for each expert."""

    operation = "experts"
    name = "mlx one by one"

    def bind(self, case: Case, weights: Arrays, memory: object) -> Bound:
        return partial(functions.experts_one_by_one, _stack(weights))


def _stack(weights: Arrays) -> Stack:
    assert weights.layer is not None, "it is in a layer"
    transposed = weights.layer.feed_forward.transposed_down
    return Stack(weights["gate"], weights["up"], weights["down"], transposed)


class MlxCombine(MlxKernel):
    """Adds up each token's expert outputs, weighted by the router, and the residual."""

    operation = "combine"

    def bind(self, case: Case, weights: object, memory: object) -> Bound:
        return functions.combine


class MlxMoELayer(MlxKernel):
    """Computes all that follows attention in a layer, without waiting for the host to read the router's choices."""

    operation = "moe_layer"
    takes = "experts in one stack, as `mlx gathered` does"

    def refusal(self, case: Case) -> str:
        """Return the reason why experts in several stacks, or bfloat16 on a CPU, are refused; empty for other cases."""
        return _not_gathered(case) if STACK in case.formats else "it takes experts in one stack"

    def bind(self, case: Case, weights: Arrays, memory: object) -> Bound:
        assert weights.stack is not None, "the case has the format STACK"
        project, route = (
            self._table.bind(self._part(case, name, weights), weights)
            for name in ("output_projection", "route")
        )
        experts = self._table.bind(self._part(case, "experts", weights.stack), weights.stack)
        return partial(_moe_layer, project, route, experts)

    def _part(self, case: Case, operation: str, weights: Arrays) -> Case:
        return case._replace(operation=operation, formats=weights.formats(OPERATIONS[operation]))


def _moe_layer(
    project: Bound, route: Bound, experts: Bound, attended_TX: Array, hidden_TD: Array
) -> tuple[Array, Array, None]:
    hidden_TD = project(attended_TX, hidden_TD)
    routed = route(hidden_TD)
    x_nD, experts_n, rows_Tk = functions.group_by_expert(routed.x_TD, routed.experts_Tk)
    y_nD = experts(x_nD, Rows(experts_n, None, len(x_nD) >= MANY_ROWS))
    return functions.combine(y_nD, rows_Tk, routed.weights_Tk, hidden_TD), routed.experts_Tk, None


class MlxLogits(MlxKernel):
    """Applies the last norm and the LM head to hidden states, which gives logits."""

    operation = "logits"

    def bind(self, case: Case, weights: Arrays, memory: object) -> Bound:
        return partial(self._logits, weights["final_norm"][0], weights["lm_head"])

    def _logits(self, norm_D: Array, head: Sequence[Array], hidden_TD: Array, rows: Sequence[int]) -> Array:
        x_SD = functions.norm(
            hidden_TD[mx.array(list(rows))], norm_D, self._config.norm_eps, self._config.norm
        )
        return functions.linear(x_SD, head).astype(mx.float32)


MLX = (
    MlxEmbed,
    MlxAttentionInputs,
    MlxAttention,
    MlxOutputProjection,
    MlxRoute,
    GatheredExperts,
    ExpertsOneByOne,
    MlxCombine,
    MlxMoELayer,
    MlxLogits,
)


def mlx_table(config: ModelConfig) -> KernelTable:
    """Make the kernel table of MLX for a model, with all kernels of this module."""
    table = KernelTable(())
    for row in MLX:
        table.add(row(config, table))
    return table


def device_name() -> str:
    """Return the device that a `Case` names for MLX's kernels: "metal" if there is a Metal GPU, otherwise "cpu"."""
    return "metal" if mx.metal.is_available() else "cpu"

"""The kernels of torch, which come last in the table: together they take every case."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from moesched.models.layers import GroupedAttention

from ..products.linear import expert_ffn, linear
from ..products.team import use_cores
from . import attention_functions, expert_functions, functions, qkv_functions
from .attention_functions import KVView
from .layer_weights import Blocks, Tensor, Weights, sinks_of
from .resources import Resources
from .seam import CODED, OPERATIONS, Bound, Case, Kernel, RouterOutput


class TorchKernel(Kernel):
    """The base of kernels in torch, for any device."""

    name = "torch"
    takes = "everything"

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._config = resources.config

    def refusal(self, case: Case) -> str:
        """Return "", as this kernel takes every case of its operation."""
        return ""

    def _product(self, case: Case, weights: Weights) -> Bound:
        """Return a function that multiplies rows by the only matrix of `weights`, by a kernel of the kernel table."""
        formats = weights.formats(OPERATIONS["product"])
        inner = case._replace(operation="product", formats=formats)
        return self._resources.table.bind(inner, weights)


class Inferring:
    """Calls a bound kernel in torch's inference mode.

    Native kernels are called without this wrapper: entering the mode would take longer than the rest of their call.
    """

    __slots__ = ("_call",)

    def __init__(self, call: Bound) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        with torch.inference_mode():
            return self._call(*arguments)


class PlainKernel(TorchKernel):
    """The base of torch's kernels for plain weights, on any device."""

    takes = "plain weights"

    def refusal(self, case: Case) -> str:
        """Return the reason why quantised ("coded") weights are refused; empty for plain weights."""
        return "it reads plain weights" if case.formats & CODED else ""


class TorchEmbed(PlainKernel):
    """Looks up the embeddings of tokens, and computes cosines and sines of rotary angles for their positions."""

    operation = "embed"

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        return self._bound(partial(functions.embed, embedding_VD=weights["embedding"][0]))

    def _bound(self, look_up: Callable[[Tensor], Tensor]) -> Bound:
        """Return the function of the operation embed; `look_up` takes token ids (T), and returns embeddings (T, D)."""
        return Inferring(partial(self._embed, look_up))

    def _embed(
        self, look_up: Callable[[Tensor], Tensor], ids: Sequence[int], positions: Sequence[int], _: object
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        use_cores(1)
        indices = self._resources.indices
        angles = qkv_functions.rotary_angles(indices(positions), self._config.attention)
        hidden_TD, factor = look_up(indices(ids)), self._config.embedding_factor
        return hidden_TD if factor == 1 else hidden_TD * factor, angles


class TorchAttentionInputs(TorchKernel):
    """Normalises hidden states, projects them to queries, keys and values, and rotates queries and keys."""

    operation = "attention_inputs"

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        names = ("attention_norm", "qkv", "q_norm", "k_norm", "q_bias", "k_bias", "v_bias")
        tensors = {name: weights[name] for name in names if name in weights}
        product = self._product(case, weights.matrix("qkv"))
        return Inferring(partial(self._project, case.attention, tensors, product))

    def _project(
        self,
        attention: GroupedAttention,
        tensors: Mapping[str, Blocks],
        product: Bound,
        hidden_TD: Tensor,
        angles: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._resources.use_cores_for(len(hidden_TD), self._config.hidden * attention.qkv_width)
        norm_D = tensors["attention_norm"][0]
        x_TD = functions.norm(hidden_TD, norm_D, self._config.norm_eps, self._config.norm)
        return qkv_functions.rotated_heads(product(x_TD), tensors, angles, self._config, attention)


class TorchAttention(TorchKernel):
    """Attends over the KV cache by calling the kernel for the operation prompt_attention."""

    operation = "attention"

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        attend = self._resources.table.bind(case._replace(operation="prompt_attention"), weights)
        return Inferring(partial(_attend_cached, attend))


def _attend_cached(attend: Bound, qkv: tuple[Tensor, Tensor, Tensor], cached: Any, step: Any) -> Tensor:
    q_THd, k_TKd, v_TKd = qkv
    attended_TX: Tensor = attend(q_THd, cached.extended(step, k_TKd, v_TKd))
    return attended_TX


class TorchPromptAttention(TorchKernel):
    """Attends from new tokens over views of keys and values."""

    operation = "prompt_attention"

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        return partial(self._attend, case.attention, sinks_of(weights))

    def _attend(
        self, attention: GroupedAttention, sinks_H: Tensor | None, q_THd: Tensor, views: Sequence[KVView]
    ) -> Tensor:
        seen = sum(len(view.keys_SLKd) * view.keys_SLKd.shape[1] for view in views)
        most = max(view.queries for view in views)
        self._resources.use_cores_for(most, seen * attention.cache_width)
        fused = self._resources.fused_attention
        return attention_functions.attention(
            q_THd, views, attention.window, fused=fused, sinks_H=sinks_H, scale=attention.scale
        )


class TorchOutputProjection(TorchKernel):
    """Projects attention's output to the hidden size, and adds the residual."""

    operation = "output_projection"
    made_of = ("product",)

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        size = self._config.hidden * case.attention.attended_width
        product = functions.with_bias(self._product(case, weights.matrix("o")), weights.get("o_bias"))
        return partial(self._project, size, product)

    def _project(self, size: int, product: Bound, attended_TX: Tensor, residual_TD: Tensor) -> Tensor:
        self._resources.use_cores_for(len(residual_TD), size)
        return functions.plus(residual_TD, product(attended_TX), self._config.residual_factor)


class TorchRoute(TorchKernel):
    """Normalises hidden states, computes the router's logits, and chooses each token's experts with their weights."""

    operation = "route"

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        network = case.network
        norm = partial(
            functions.norm,
            weight_D=weights["ffn_norm"][0],
            eps=self._config.norm_eps,
            kind=self._config.norm,
        )
        if network.experts <= 1:
            return partial(_route_to_all, network.experts, norm)
        added_E, correction_E = expert_functions.router_biases(weights, network)
        logits = partial(expert_functions.router_logits, router=weights["router"], bias_E=added_E)
        choose = partial(expert_functions.choose_experts, network=network, bias_E=correction_E)
        return partial(_route, norm, logits, choose)


def _route_to_all(experts: int, norm: Callable[[Tensor], Tensor], hidden_TD: Tensor) -> RouterOutput:
    """Normalise hidden states; each token gets the layer's only expert, with weight 1, or none if the layer has none.

    experts: number of experts of the layer: 0 or 1.
    """
    x_TD = norm(hidden_TD)
    ones_Tk = x_TD.new_ones((len(x_TD), experts), dtype=torch.float32)
    return RouterOutput(x_TD, x_TD.new_zeros((len(x_TD), experts), dtype=torch.int64), ones_Tk, ones_Tk)


def _route(
    norm: Callable[[Tensor], Tensor],
    logits: Callable[[Tensor], Tensor],
    choose: Callable[[Tensor], tuple[Tensor, Tensor]],
    hidden_TD: Tensor,
) -> RouterOutput:
    x_TD = norm(hidden_TD)
    logits_TE = logits(x_TD)
    return RouterOutput(x_TD, *choose(logits_TE), logits_TE)


class TorchExpert(PlainKernel):
    """Runs one expert that has three matrices and the activation SiLU."""

    operation = "expert"
    takes = "plain weights of experts without biases"

    def refusal(self, case: Case) -> str:
        """Return why a case is refused: quantised weights, or experts other than three matrices with SiLU; else ""."""
        usual = case.network.is_usual
        return super().refusal(case) or ("" if usual else "it runs experts of three matrices")

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        return partial(_apply_expert, weights["gate"], weights["up"], weights["down"])


def _apply_expert(gate: Blocks, up: Blocks, down: Blocks, x_nD: Tensor, y_nD: Tensor) -> None:
    y_nD.copy_(expert_ffn(x_nD, gate, up, down))


class TorchCombine(TorchKernel):
    """Adds up each token's expert outputs, weighted by the router, and the residual."""

    operation = "combine"

    def bind(self, case: Case, weights: object, memory: object) -> Bound:
        return _combine


def _combine(y_nD: Tensor, rows_Tk: Tensor, weights_Tk: Tensor, residual_TD: Tensor) -> Tensor:
    use_cores(1)
    return expert_functions.combine(y_nD, rows_Tk, weights_Tk, residual_TD)


class TorchLogits(TorchKernel):
    """Applies the last norm and the LM head, which gives logits; on the CPU, cores may compute blocks side by side."""

    operation = "logits"

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        head = weights.matrix("lm_head")
        inner = case._replace(operation="product", formats=head.formats(OPERATIONS["product"]))
        shares = self._resources.team is not None and not self._resources.table.require(inner).has_threads
        blocks = [Weights({"matrix": [block]}) for block in weights["lm_head"]]
        multiply = (
            partial(self._multiply_shared, [self._product(case, block) for block in blocks])
            if shares
            else partial(self._multiply, self._product(case, head))
        )
        return partial(self._logits, weights["final_norm"][0], multiply)

    def _logits(
        self, norm_D: Tensor, multiply: Callable[[Tensor], Tensor], hidden_TD: Tensor, rows: Sequence[int]
    ) -> Tensor:
        last_SD = hidden_TD.index_select(0, self._resources.indices(rows))
        logits_SV = multiply(
            functions.norm(last_SD, norm_D, self._config.norm_eps, self._config.norm)
        ).float()
        factor = self._config.logits_factor
        return logits_SV if factor == 1 else logits_SV * factor

    def _multiply(self, product: Bound, x_SD: Tensor) -> Tensor:
        config = self._config
        self._resources.use_cores_for(len(x_SD), config.vocabulary // config.ranks * config.hidden)
        logits_SV: Tensor = product(x_SD)
        return logits_SV

    def _multiply_shared(self, products: Sequence[Bound], x_SD: Tensor) -> Tensor:
        team = self._resources.team
        assert team is not None, "the blocks are shared out"
        parts: dict[int, Tensor] = {}
        team.run([partial(_multiply_block, x_SD, product, parts, n) for n, product in enumerate(products)])
        return torch.cat([parts[n] for n in range(len(products))], dim=-1)


def _multiply_block(x_TD: Tensor, product: Bound, into: dict[int, Tensor], number: int) -> None:
    into[number] = product(x_TD)


class TorchGreedy(TorchKernel):
    """Computes, on the GPU, the logits and the likeliest token of each row of hidden states that a call asks for."""

    operation = "greedy"
    takes = "everything on GPUs"

    def refusal(self, case: Case) -> str:
        """Return the reason why the CPU is refused; empty for GPUs.

        Where the logits are on the host, sampling finds the likeliest token without a kernel.
        """
        return "it is for logits that are not on the host" if case.device == "cpu" else ""

    def bind(self, case: Case, weights: Weights, memory: Any) -> Bound:
        inner = case._replace(operation="logits")
        return Inferring(partial(_likeliest, self._resources.table.bind(inner, weights, memory)))


def _likeliest(logits: Bound, hidden_TD: Tensor, rows: Sequence[int]) -> tuple[Tensor, list[int]]:
    logits_SV = logits(hidden_TD, rows)
    return logits_SV, functions.likeliest(logits_SV).tolist()


class TorchProduct(PlainKernel):
    """Multiplies rows by a matrix whose blocks are plain or packed."""

    operation = "product"

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        return partial(linear, blocks=weights["matrix"])


TORCH = (
    TorchEmbed,
    TorchAttentionInputs,
    TorchAttention,
    TorchPromptAttention,
    TorchOutputProjection,
    TorchRoute,
    TorchExpert,
    TorchCombine,
    TorchLogits,
    TorchGreedy,
    TorchProduct,
)

"""The kernels of the kernel table that compute with Triton on GPUs, by calling the operators of `operators.py`.

Results stay in the memory of the micro-batch, where later layers and steps overwrite them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import chain, islice
from typing import Any, TypeVar

import torch

from moesched.models.footprint import KEPT_ROWS
from moesched.models.networks import FeedForward

from . import operators, qkv_functions
from .kernel_weights import EXPERT_PARTS
from .layer_weights import Tensor, Weights
from .resources import Resources, uncaptured
from .seam import Bound, Case, RouterOutput
from .triton_attention_rows import (
    TritonAttention,
    TritonAttentionInputs,
    TritonPromptAttention,
    parts_of,
)
from .triton_kernel import DTYPES, TritonKernel, power_of_two
from .workspace import SharedMemory, Workspace

T = TypeVar("T")

GROUPED_BYTES = 1 << 13
"""Most experts' rows in a call, times the bytes of a number: results then fit into the plan's workspace."""


class TritonEmbed(TritonKernel):
    """Looks up the embeddings of tokens, and computes cosines and sines of rotary angles for their positions."""

    operation = "embed"

    @cached_property
    def _frequencies_h(self) -> Tensor:
        """The angles in radians by which pairs of a head's entries turn per position, float32, on the GPU."""
        return qkv_functions.rotary_frequencies(self._config.attention, self._device)

    def refusal(self, case: Case) -> str:
        """Return the reason why a case is refused: scaled cosines and sines, or a reason of `TritonKernel`; else ""."""
        plain = self._config.attention.rotary.magnitude == 1
        return super().refusal(case) or ("" if plain else "its cosines and sines have magnitude 1")

    def bind(self, case: Case, weights: Weights, memory: Workspace) -> Bound:
        attention = self._config.attention
        hidden_TD = self._result(memory, "hidden", case.rows, self._config.hidden)
        shape = case.rows, 1, attention.rotary.turning(attention.head_dim)
        angles = tuple(
            self._result(memory, name, *shape, dtype=torch.float32) for name in ("cosines", "sines")
        )
        arguments = weights["embedding"][0], self._frequencies_h, hidden_TD, *angles

        def launch(ids_T: Tensor, positions_T: Tensor, shapes: object) -> None:
            operators.embed(ids_T, positions_T, *arguments)

        look_up = self._captured(launch, memory)

        @lru_cache(maxsize=1)
        def places(*lengths: int) -> tuple[Tensor, tuple[Tensor, ...]]:
            """Return an int64 GPU tensor for a step's integers, and the tensor's consecutive parts of these lengths."""
            numbers = self._result(memory, "numbers", sum(lengths), dtype=torch.int64)
            return numbers, numbers.split(lengths)

        def embed(
            ids: Sequence[int], positions: Sequence[int], steps: Sequence[Any]
        ) -> tuple[Tensor, tuple[Tensor, ...]]:
            here = [step for step in steps if not step.on_host]
            lists = [_padded(*step.numbers) for step in here]
            flat = [*chain(*lists)]
            numbers, (ids_T, positions_T, *kept) = places(case.rows, case.rows, *map(len, flat))
            self._upload(sum(flat, array("q", [*ids, *positions])), numbers)
            left = iter(kept)
            for step, own in zip(here, lists, strict=True):
                step.keep(*islice(left, len(own)))
            # Later calls of the step depend on these, too, and may be launched by this one.
            shapes = memory.decodes, tuple(map(len, flat)), tuple(map(parts_of, here))
            look_up(ids_T, positions_T, shapes)
            return hidden_TD, angles

        return embed


class TritonOutputProjection(TritonKernel):
    """Projects attention's output to the hidden size, and adds the residual."""

    operation = "output_projection"

    def bind(self, case: Case, weights: Weights, memory: Workspace) -> Bound:
        matrix = self._matrix(weights["o"])
        out_TD = self._result(memory, "projected", case.rows, self._config.hidden)

        def project(attended_TX: Tensor, residual_TD: Tensor) -> Tensor:
            operators.output_projection(attended_TX, *matrix, residual_TD, out_TD)
            return out_TD

        return self._captured(project, memory)


class TritonRoute(TritonKernel):
    """Normalises hidden states, computes the router's logits, and chooses each token's experts with their weights."""

    operation = "route"

    def refusal(self, case: Case) -> str:
        """Return the reason why a case is refused; empty if the kernel takes the case.

        Refused are a layer with fewer than two experts, sigmoid scores, corrected scores, groups of experts, and all
        that `TritonKernel` refuses.
        """
        network = case.network
        router = network.router
        plain = (
            network.experts > 1 and router.score == "softmax" and not router.corrected and router.groups == 1
        )
        return super().refusal(case) or ("" if plain else "it takes a router with softmax, without groups")

    def bind(self, case: Case, weights: Weights, memory: Workspace) -> Bound:
        network, rows = case.network, case.rows
        norm_D, matrix = weights["ffn_norm"][0], self._matrix(weights["router"])
        written = (
            self._result(memory, "normed", rows, self._config.hidden),
            self._result(memory, "experts", rows, network.top_k, dtype=torch.int64),
            self._result(memory, "weights", rows, network.top_k, dtype=torch.float32),
            self._result(memory, "router logits", rows, network.experts, dtype=torch.float32),
        )
        routed = RouterOutput(*written)
        settings = self._config.norm_eps, self._layer_norm, network.router.normalised

        def route(hidden_TD: Tensor) -> RouterOutput:
            operators.route(hidden_TD, norm_D, *matrix, *settings, *written)
            return routed

        return self._captured(route, memory)


class TritonExpert(TritonKernel):
    """Runs one expert on the rows of tokens that chose it."""

    operation = "expert"
    uses_memory = False

    def bind(self, case: Case, weights: Weights, memory: object) -> Bound:
        intermediate = sum(map(len, weights["gate"]))
        gate, up, down = (self._matrix(weights[part]) for part in EXPERT_PARTS)

        def run(x_nD: Tensor, y_nD: Tensor) -> None:
            starts = self._indices([0, len(x_nD)])
            inner_nI = x_nD.new_empty(len(x_nD), intermediate)
            operators.gate_and_up(x_nD, None, starts, *gate, *up, inner_nI, None)
            operators.down(inner_nI, starts, *down, y_nD)

        return run


class TritonCombine(TritonKernel):
    """Adds up each token's expert outputs, weighted by the router, and the residual."""

    operation = "combine"

    def bind(self, case: Case, weights: object, memory: Workspace) -> Bound:
        out_TD = self._result(memory, "hidden", case.rows, self._config.hidden)

        def combine(y_nD: Tensor, rows_Tk: Tensor, weights_Tk: Tensor, residual_TD: Tensor) -> Tensor:
            operators.combine(y_nD, rows_Tk, weights_Tk, residual_TD, out_TD)
            return out_TD

        return combine


class TritonMoELayer(TritonKernel):
    """Computes all that follows attention in a layer in six launches, without waiting for the router's choices.

    Many tokens are split into parts; the experts run on one part after the other, which bounds the memory.
    """

    operation = "moe_layer"

    def __init__(self, resources: Resources) -> None:
        super().__init__(resources)
        parts = replace(resources, captured=uncaptured)
        self._project = TritonOutputProjection(parts)
        self._route = TritonRoute(parts)

    def refusal(self, case: Case) -> str:
        """Return the reason why a case is refused: a shared expert, or a reason of `TritonRoute`; else empty."""
        shared = "it runs routed experts" if case.network.shared else ""
        return self._route.refusal(case) or shared

    def bind(self, case: Case, weights: Weights, memory: Workspace) -> Bound:
        network = case.network
        # Copied to the host when later layers may have run.
        experts_Tk = self._result(
            Workspace(case.rows), "experts", case.rows, network.top_k, dtype=torch.int64
        )
        shared = SharedMemory(case.rows, memory.scratch, experts=experts_Tk)
        project, route = (part.bind(case, weights, shared) for part in (self._project, self._route))
        tokens = min(case.rows, max(1, GROUPED_BYTES // DTYPES[case.dtype] // network.top_k))
        gated_nI = self._gated(case.rows * network.top_k, network.intermediate, memory)
        add_experts = self._experts(tokens, network, weights, memory, gated_nI)
        out_TD = self._result(memory, "hidden", case.rows, self._config.hidden)

        def run(attended_TX: Tensor, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
            projected_TD = project(attended_TX, hidden_TD)
            routed = route(projected_TD)
            whole = routed.x_TD, routed.experts_Tk, routed.weights_Tk, projected_TD, out_TD
            for part in zip(*(each.split(tokens) for each in whole), strict=True):
                add_experts(*part)
            return out_TD, routed.experts_Tk, gated_nI

        return self._captured(run, memory)

    def _gated(self, rows: int, intermediate: int, memory: Workspace) -> Tensor | None:
        """Return memory for experts' activations (rows, I), float32; None in a kernel that does not report them."""
        return None

    def _experts(
        self,
        tokens: int,
        network: FeedForward,
        weights: Weights,
        memory: Workspace,
        gated_nI: Tensor | None,
    ) -> Callable[..., None]:
        """Return the function that runs the experts for up to `tokens` tokens and adds the residual, writing out_TD.

        The function is (x_TD, experts_Tk, weights_Tk, residual_TD, out_TD) -> None.

        gated_nI: receives the activations silu(gate x); None to drop them.
        """
        gates, ups, downs = (
            self._matrix(*(weights[f"experts.{expert}.{part}"] for expert in range(network.experts)))
            for part in EXPERT_PARTS
        )
        rows = tokens * network.top_k
        most_Tk = self._scratch(memory, "rows", tokens, network.top_k, dtype=torch.int64)
        pairs_n = self._scratch(memory, "pairs", rows, dtype=torch.int32)
        starts_E = self._scratch(memory, "starts", network.experts + 1, dtype=torch.int64)
        inner_nI = self._scratch(memory, "inner", rows, network.intermediate)
        y_nD = self._scratch(memory, "outputs", rows, self._config.hidden)

        def add(
            x_TD: Tensor, experts_Tk: Tensor, weights_Tk: Tensor, residual_TD: Tensor, out_TD: Tensor
        ) -> None:
            rows_Tk, n = most_Tk[: len(x_TD)], experts_Tk.numel()
            operators.sort_rows(experts_Tk, rows_Tk, pairs_n[:n], starts_E)
            operators.gate_and_up(x_TD, pairs_n[:n], starts_E, *gates, *ups, inner_nI[:n], gated_nI)
            operators.down(inner_nI[:n], starts_E, *downs, y_nD[:n])
            operators.combine(y_nD[:n], rows_Tk, weights_Tk, residual_TD, out_TD)

        return add


class TritonObservedLayer(TritonMoELayer):
    """Computes what `TritonMoELayer` does, for up to `KEPT_ROWS` tokens in one part, and returns silu(gate x), too."""

    operation = "observed_moe_layer"

    def refusal(self, case: Case) -> str:
        """Return the reason why a case is refused: too many tokens, or a reason of `TritonMoELayer`; else ""."""
        few = case.rows <= KEPT_ROWS and case.rows * DTYPES[case.dtype] <= GROUPED_BYTES // _top_k(case)
        return super().refusal(case) or ("" if few else f"it takes up to {KEPT_ROWS} rows in one part")

    def _gated(self, rows: int, intermediate: int, memory: Workspace) -> Tensor:
        return self._scratch(memory, "gated", rows, intermediate, dtype=torch.float32)


class TritonLogits(TritonKernel):
    """Applies the last norm and the LM head to hidden states, which gives logits."""

    operation = "logits"

    def bind(self, case: Case, weights: Weights, memory: Workspace) -> Bound:
        return partial(self._on_rows, self._captured(self._logits(case, weights, memory), memory))

    def _logits(self, case: Case, weights: Weights, memory: Workspace) -> Callable[[Tensor], Tensor]:
        normed = self._normed(weights["final_norm"][0], case.rows, memory)
        matrix = self._matrix(weights["lm_head"])
        vocabulary = sum(map(len, weights["lm_head"]))
        logits_SV = self._scratch(memory, "logits", case.rows, vocabulary, dtype=torch.float32)

        def compute(hidden_SD: Tensor) -> Tensor:
            operators.logits(normed(hidden_SD), *matrix, logits_SV)
            return logits_SV

        return compute

    def _on_rows(self, run: Callable[[Tensor], T], hidden_TD: Tensor, rows: Sequence[int]) -> T:
        whole = len(rows) == len(hidden_TD)
        return run(hidden_TD if whole else hidden_TD.index_select(0, self._indices(rows)))


class TritonGreedy(TritonLogits):
    """Computes the logits of some rows and finds the likeliest token of each row on the GPU."""

    operation = "greedy"

    def bind(self, case: Case, weights: Weights, memory: Workspace) -> Bound:
        logits = self._logits(case, weights, memory)
        tokens_S = self._result(memory, "tokens", case.rows, dtype=torch.int64)

        def compute(hidden_SD: Tensor) -> tuple[Tensor, Tensor]:
            logits_SV = logits(hidden_SD)
            operators.likeliest(logits_SV, tokens_S)
            return logits_SV, tokens_S

        launch = partial(self._on_rows, self._captured(compute, memory))

        def choose(hidden_TD: Tensor, rows: Sequence[int]) -> tuple[Tensor, list[int]]:
            logits_SV, tokens_S = launch(hidden_TD, rows)
            return logits_SV, tokens_S.tolist()

        return choose


TRITON = (
    TritonEmbed,
    TritonAttentionInputs,
    TritonAttention,
    TritonPromptAttention,
    TritonOutputProjection,
    TritonRoute,
    TritonExpert,
    TritonCombine,
    TritonMoELayer,
    TritonObservedLayer,
    TritonLogits,
    TritonGreedy,
)


def _top_k(case: Case) -> int:
    return case.network.top_k


def _padded(table: array[int], *others: array[int]) -> list[array[int]]:
    """Append zeros to a step's block table, so that its length is a power of two; returns all arrays of the step.

    While sequences grow, this length seldom changes. So the arrays keep their places in a GPU tensor, and a graph that
    reads them can be replayed.
    """
    return [table + array("q", [0]) * (power_of_two(len(table)) - len(table)), *others]

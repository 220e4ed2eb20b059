"""The search for the origin of numbers that are not finite: runs a step again and checks every tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from moesched.models.config import ModelConfig
from moesched.models.layout import Page, WeightLayout
from moesched.models.networks import FeedForward

from ..kernels import attention_functions, expert_functions, functions, qkv_functions
from ..kernels.attention_functions import KVView
from ..kernels.expert_of_products import expert_of
from ..kernels.kernel_weights import EXPERT_PARTS
from ..kernels.seam import RouterOutput
from ..products.linear import Tensor, expert_ffn, linear
from ..runner.library import with_rows
from ..runner.micro_batch import MicroBatchState
from ..shared.arena import aligned_bytes
from ..shared.bad_weights import describe_first_bad_weight, first_bad
from ..shared.coded import Block, plain_block
from ..shared.page_reader import PageReader
from .expert_rows import ExpertRows
from .prompt_views import prompt_views

PlainBlocks = dict[str, list[Tensor]]
"""Tensors by name, as row blocks; quantised ones are decoded to the dtype of the computation."""


class FirstBadTensor:
    """Computes a micro-batch's step again, page by page from the files, to find the first tensor that is not finite.

    This takes memory for the activations, and for one expert or one layer's dense part. No KV cache is written to. In
    tensor-parallel runs, no step is computed: only the weights are checked.

    Args:
        accelerator: torch device that computes the step again.
        fused: whether attention runs by a kernel of torch that stores no scores.
    """

    def __init__(
        self, reader: PageReader, layout: WeightLayout, accelerator: torch.device, *, fused: bool
    ) -> None:
        self._reader = reader
        self._layout = layout
        self._config: ModelConfig = layout.config
        self._accelerator = accelerator
        self._fused = fused

    def name(self, state: MicroBatchState) -> str | None:
        """Describe the first tensor, in the order of computation, that has a number which is not finite.

        The result is None if all numbers are finite. In tensor-parallel runs only weights are checked, so the result is
        never None: if all weights are finite, it says that an activation must be the cause.

        state: the state of the micro-batch. If it is that of a chunk of prefill, earlier chunks are checked first.
        """
        if self._config.ranks > 1:
            return describe_first_bad_weight(self._reader, self._layout)
        return first_bad(self._chunks(state))

    def _chunks(self, state: MicroBatchState) -> Iterator[tuple[str, Tensor]]:
        if state.before is not None:
            yield from self._chunks(state.before)
        yield from self._step(state)

    def _step(self, state: MicroBatchState) -> Iterator[tuple[str, Tensor]]:
        """Compute a micro-batch's step again; yields the tensors, weights included, in the order of computation.

        Each tensor is in a pair with its description.
        """
        config = self._config
        embedding = self._global("embedding")
        ids_T = torch.tensor([token for tokens in state.new for token in tokens]).to(self._accelerator)
        hidden_TD = functions.embed(ids_T, embedding) * config.embedding_factor
        yield "weight embedding", hidden_TD
        for layer, described in enumerate(config.pattern):
            attention, network = described.grouped, described.feed_forward
            weights = self._weights(self._layout.dense(layer))
            yield from _named(weights)
            weights = _within_layer(weights)
            weights["qkv"] = [*weights.pop("q"), *weights.pop("k"), *weights.pop("v")]
            qkv = qkv_functions.project_qkv(hidden_TD, weights, state.angles, config, attention)
            for name, tensor in zip(("queries", "keys", "values"), qkv, strict=True):
                yield f"the {name} of layer {layer}", tensor
            q_THd, k_TKd, v_TKd = qkv
            views = self._cached(state, layer, k_TKd, v_TKd)
            for keys, values, new in views:
                yield f"the cached keys of layer {layer}", keys[:, :-new]
                yield f"the cached values of layer {layer}", values[:, :-new]
            sinks_H = weights["sinks"][0] if attention.sinks else None
            attended_TX = attention_functions.attention(
                q_THd, views, attention.window, fused=self._fused, sinks_H=sinks_H, scale=attention.scale
            )
            yield f"attention's output in layer {layer}", attended_TX
            hidden_TD = functions.output_projection(
                attended_TX, weights["o"], hidden_TD, weights.get("o_bias"), config.residual_factor
            )
            yield f"the hidden states after attention in layer {layer}", hidden_TD
            x_TD = functions.norm(hidden_TD, weights["ffn_norm"][0], config.norm_eps, config.norm)
            experts_Tk, weights_Tk = _route(x_TD, weights, network)
            yield f"the router's weights in layer {layer}", weights_Tk
            rows = ExpertRows(RouterOutput(x_TD, experts_Tk, weights_Tk), network)
            yield from self._experts(layer, network, experts_Tk, rows)
            if rows.shared is not None:
                gate, up, down = (weights[f"shared_{part}"] for part in EXPERT_PARTS)
                y_TD = rows.shared.y_nD.copy_(expert_ffn(x_TD, gate, up, down))
                yield f"the output in layer {layer} of the network that every token uses", y_TD
            hidden_TD = expert_functions.combine(*rows.outputs(), hidden_TD)
            yield f"the hidden states after layer {layer}", hidden_TD
        final_norm = self._global("final_norm")
        yield "weight final_norm", final_norm
        head_name = "embedding" if config.tied_embeddings else "lm_head"
        head = self._global(head_name)
        yield f"weight {head_name}", head
        last_SD = hidden_TD[torch.tensor(state.step.last).to(self._accelerator)]
        yield "the logits", functions.lm_head(last_SD, final_norm, [head], config.norm_eps, config.norm)

    def _experts(
        self, layer: int, network: FeedForward, experts_Tk: Tensor, rows: ExpertRows
    ) -> Iterator[tuple[str, Tensor]]:
        """Run the experts that have rows; yields their weights and outputs, each tensor in a pair with its description.

        Args:
            layer: number of the layer.
            network: description of the layer's experts.
            experts_Tk: the experts of each token.
            rows: the experts' rows, which the outputs are written to.
        """
        counts = with_rows(experts_Tk.view(-1).bincount(minlength=network.experts).tolist())
        rows.count(counts)
        for expert in counts:
            mine = self._weights(self._layout.expert(layer, expert))
            yield from _named(mine)
            prefix = f"layers.{layer}.experts.{expert}."
            own = {name.removeprefix(prefix): blocks for name, blocks in mine.items()}
            products = {name: partial(linear, blocks=blocks) for name, blocks in own.items()}
            span, part = rows.of(expert), rows.part(expert)
            rows.y_nD[span.start : span.stop] = expert_of(products, own, network.activation)(part.input)
            yield f"the output of expert {expert} of layer {layer}", rows.y_nD[span.start : span.stop]

    def _cached(self, state: MicroBatchState, layer: int, k_TKd: Tensor, v_TKd: Tensor) -> Sequence[KVView]:
        """Return views of copies of the keys and values that the step's tokens attend to.

        Those of earlier tokens are copied from the layer's KV cache. Those of the new tokens are `k_TKd` and `v_TKd`,
        since a cache on the host may not have them yet.
        """
        views = []
        start = 0
        cached, step = state.cached(layer)
        if not step.in_place:  # of a window before a chunk, later tokens may have taken the places
            return prompt_views(step, (cached.keys, cached.values), (k_TKd, v_TKd))
        for keys, values, new in cached.views(step):
            end = start + len(keys) * new
            view = KVView(keys.to(self._accelerator, copy=True), values.to(self._accelerator, copy=True), new)
            view.keys_SLKd[:, -new:] = k_TKd[start:end].reshape(view.keys_SLKd[:, -new:].shape)
            view.values_SLKd[:, -new:] = v_TKd[start:end].reshape(view.values_SLKd[:, -new:].shape)
            views.append(view)
            start = end
        return views

    def _weights(self, pages: Sequence[Page]) -> PlainBlocks:
        """Read pages from the files; returns their tensors by canonical name, as row blocks, decoded if quantised."""
        weights: PlainBlocks = {}
        for page in pages:
            memory = aligned_bytes(self._reader.bytes_in_slot(page))
            self._reader.read(page, memory)
            for name, blocks in self._reader.views(memory, page).items():
                weights.setdefault(name, []).extend(map(self._plain, blocks))
        return weights

    def _global(self, name: str) -> Tensor:
        return self._plain(self._reader.read_tensor(name))

    def _plain(self, block: Block) -> Tensor:
        return plain_block(block, self._reader.dtype).to(self._accelerator)


def _route(x_TD: Tensor, weights: PlainBlocks, network: FeedForward) -> tuple[Tensor, Tensor]:
    if network.experts <= 1:
        tokens = (len(x_TD), network.experts)
        return x_TD.new_zeros(tokens, dtype=torch.int64), x_TD.new_ones(tokens, dtype=torch.float32)
    return expert_functions.route(x_TD, weights, network)


def _named(weights: PlainBlocks) -> Iterator[tuple[str, Tensor]]:
    for name, blocks in weights.items():
        for block in blocks:
            yield f"weight {name}", block


def _within_layer(weights: PlainBlocks) -> PlainBlocks:
    return {name.split(".", 2)[2]: blocks for name, blocks in weights.items()}

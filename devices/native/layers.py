"""The tasks of a layer as one native call each, for few rows of bfloat16 models on the CPU.

Pointers to a layer's weights are prepared once and kept with them. Shapes in names as in `devices/torch/kernels.py`.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch

from moesched.models.config import ModelConfig

from .kernels import Blocks, NativeKernels, Tensor, address, are_rows, rows_of
from .library import library

_NUMBER, _POINTER, _REAL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double


class _Prepared(NamedTuple):
    """Arguments with the pointers to a layer's weights, and the arrays that these point to."""

    arguments: ctypes.Structure
    held: list[array[int]]


class LayerWeights(dict[str, list[Tensor]]):
    """The tensors of a layer by name, as row blocks, with what the kernels keep of them.

    Attributes:
        plain: whether all matrices are plain row blocks; None until a kernel asks.
        prepared: the arguments of each native call.
    """

    def __init__(self, blocks: Mapping[str, Blocks] = MappingProxyType({})) -> None:
        super().__init__({name: list(each) for name, each in blocks.items()})
        self.plain: bool | None = None
        self.prepared: dict[type[ctypes.Structure], _Prepared] = {}


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("epsilon", _REAL), ("subtracts_mean", _NUMBER))


class _Tokens(ctypes.Structure):
    """As in embedding.c."""

    _fields_ = (
        *((name, _NUMBER) for name in ("tokens", "hidden", "head_dim")),
        *(
            (name, _POINTER)
            for name in ("ids", "positions", "embedding", "frequencies", "x", "cosines", "sines")
        ),
    )


class _Inputs(ctypes.Structure):
    """As in attention_inputs.c."""

    _fields_ = (
        *((name, _NUMBER) for name in ("tokens", "hidden", "heads", "kv_heads", "head_dim")),
        ("x", _POINTER),
        ("norm", _Norm),
        *((name, _POINTER) for name in ("weights", "query_norm", "key_norm")),
        *((name, _NUMBER) for name in ("query_normed", "key_normed")),
        ("clip", _REAL),
        *((name, _POINTER) for name in ("cosines", "sines", "queries", "keys", "values")),
    )


class _Layer(ctypes.Structure):
    """As in moe_layer.c."""

    _fields_ = (
        *((name, _NUMBER) for name in ("tokens", "hidden", "attended_width", "experts", "top_k", "width")),
        ("sum_to_one", _NUMBER),
        *((name, _POINTER) for name in ("attended", "residual", "output_weights")),
        ("norm", _Norm),
        *((name, _POINTER) for name in ("router", "expert_weights", "projected", "x", "logits", "chosen")),
        *((name, _POINTER) for name in ("weights", "counts", "out")),
    )


class _Head(ctypes.Structure):
    """As in logits.c."""

    _fields_ = (
        *((name, _NUMBER) for name in ("rows", "hidden", "vocabulary")),
        *((name, _POINTER) for name in ("x", "chosen")),
        ("norm", _Norm),
        *((name, _POINTER) for name in ("weights", "logits")),
    )


A = TypeVar("A", bound=ctypes.Structure)
Make = Callable[[LayerWeights, "list[array[int]]"], A]


class Choices(NamedTuple):
    """A router's result: the experts' input; the experts of each token, int64, ascending; their weights; the logits."""

    x_TD: Tensor
    experts_Tk: Tensor
    weights_Tk: Tensor
    logits_TE: Tensor


class NativeLayers:
    """Runs a model's tasks for few rows; a row's bits depend on no other row, and on the instruction set alone.

    Roundings to bfloat16 are where torch has them: after each product, norm, rotation and sum.
    """

    def __init__(self, config: ModelConfig, kernels: NativeKernels) -> None:
        self._config = config
        self._kernels = kernels
        self._call = kernels.call
        self._library = library()
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

    def embed(
        self, ids: Sequence[int], positions: Sequence[int], embedding_VD: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The tokens' embeddings (T, D), and the cosines and signed sines (T, d) that rotate queries and keys."""
        config, tokens = self._config, len(ids)
        x_TD = embedding_VD.new_empty(tokens, config.hidden)
        cosines_Td, sines_Td = torch.empty(2, tokens, config.head_dim)
        numbers = array("q", (*ids, *positions))
        arguments = _Tokens(
            tokens=tokens,
            hidden=config.hidden,
            head_dim=config.head_dim,
            ids=address(numbers),
            positions=address(numbers) + tokens * numbers.itemsize,
            embedding=embedding_VD.data_ptr(),
            frequencies=self._frequencies.data_ptr(),
            x=x_TD.data_ptr(),
            cosines=cosines_Td.data_ptr(),
            sines=sines_Td.data_ptr(),
        )
        self._call(self._library.moesched_embed, arguments)
        return x_TD, (cosines_Td, sines_Td)

    def attention_inputs(
        self, x_TD: Tensor, weights: LayerWeights, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Norm, projection and rotation: queries (T, H, d), keys and values (T, K, d).

        angles: cosines and signed sines of T * d numbers, float32.
        """
        config, tokens = self._config, len(x_TD)
        q_THd = x_TD.new_empty(tokens, config.heads, config.head_dim)
        k_TKd = x_TD.new_empty(tokens, config.kv_heads, config.head_dim)
        v_TKd = torch.empty_like(k_TKd)
        inputs = self._arguments(_Inputs, self._inputs, weights)
        inputs.tokens = tokens
        inputs.x = x_TD.data_ptr()
        inputs.cosines, inputs.sines = (each.data_ptr() for each in angles)
        inputs.queries, inputs.keys, inputs.values = q_THd.data_ptr(), k_TKd.data_ptr(), v_TKd.data_ptr()
        self._call(self._library.moesched_attention_inputs, inputs)
        return q_THd, k_TKd, v_TKd

    def route(self, hidden_TD: Tensor, weights: LayerWeights) -> Choices:
        """Norm and router."""
        layer, choices = self._layer(hidden_TD, weights)
        layer.output_weights = None
        self._call(self._library.moesched_route, layer)
        return choices

    def run(
        self, residual_TD: Tensor, attended_TX: Tensor, weights: LayerWeights
    ) -> tuple[Tensor, Tensor, dict[int, int]]:
        """All that follows attention: the new hidden states, the experts of each token, and the rows of each expert."""
        layer, choices = self._layer(residual_TD, weights)
        projected_TD, out_TD = torch.empty_like(residual_TD), torch.empty_like(residual_TD)
        counts = (ctypes.c_int64 * self._config.experts)()
        layer.attended, layer.projected = attended_TX.data_ptr(), projected_TD.data_ptr()
        layer.out, layer.counts = out_TD.data_ptr(), ctypes.addressof(counts)
        self._call(self._library.moesched_moe_layer, layer)
        return out_TD, choices.experts_Tk, {expert: rows for expert, rows in enumerate(counts) if rows}

    def combine(self, y_nD: Tensor, rows_Tk: Tensor, weights_Tk: Tensor, residual_TD: Tensor) -> Tensor:
        """The residual plus the weighted sum of each token's experts, whose outputs are rows of y."""
        out_TD = torch.empty_like(residual_TD)
        tensors = (y_nD, rows_Tk, weights_Tk, residual_TD, out_TD)
        sizes = (len(residual_TD), residual_TD.shape[1], rows_Tk.shape[1])
        self._library.moesched_combine(*sizes, *(each.data_ptr() for each in tensors))
        return out_TD

    def logits(self, x_TD: Tensor, last_S: Tensor, norm_D: Tensor, head: LayerWeights) -> Tensor:
        """The logits (S, V), float32, of some rows of x."""
        arguments = self._arguments(_Head, self._head, head)
        arguments.norm = self._norm(norm_D)
        logits_SV = torch.empty(len(last_S), arguments.vocabulary)
        arguments.rows = len(last_S)
        arguments.x, arguments.chosen = x_TD.data_ptr(), last_S.data_ptr()
        arguments.logits = logits_SV.data_ptr()
        self._call(self._library.moesched_logits, arguments)
        return logits_SV

    def _layer(self, hidden_TD: Tensor, weights: LayerWeights) -> tuple[_Layer, Choices]:
        config, tokens = self._config, len(hidden_TD)
        x_TD = torch.empty_like(hidden_TD)
        logits_TE = torch.zeros(tokens, config.experts)
        experts_Tk = torch.empty(tokens, config.top_k, dtype=torch.int64)
        weights_Tk = torch.empty(tokens, config.top_k)
        layer = self._arguments(_Layer, self._moe, weights)
        layer.tokens, layer.residual = tokens, hidden_TD.data_ptr()
        layer.x, layer.logits = x_TD.data_ptr(), logits_TE.data_ptr()
        layer.chosen, layer.weights = experts_Tk.data_ptr(), weights_Tk.data_ptr()
        return layer, Choices(x_TD, experts_Tk, weights_Tk, logits_TE)

    def _arguments(self, kind: type[A], make: Make[A], weights: LayerWeights) -> A:
        """A copy of the arguments that were prepared for these weights: lanes may call at the same time."""
        prepared = weights.prepared.get(kind)
        if prepared is None:
            held: list[array[int]] = []
            prepared = weights.prepared[kind] = _Prepared(make(weights, held), held)
        return kind.from_buffer_copy(prepared.arguments)

    def _inputs(self, weights: LayerWeights, held: list[array[int]]) -> _Inputs:
        config = self._config
        inputs = _Inputs(
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            norm=self._norm(weights["attention_norm"][0]),
            weights=_held([*weights["q"], *weights["k"], *weights["v"]], held),
            clip=config.clip_qkv or 0.0,
        )
        if config.qk_norm:
            query, key = weights["q_norm"][0], weights["k_norm"][0]
            inputs.query_norm, inputs.query_normed = query.data_ptr(), len(query)
            inputs.key_norm, inputs.key_normed = key.data_ptr(), len(key)
        return inputs

    def _moe(self, weights: LayerWeights, held: list[array[int]]) -> _Layer:
        config = self._config
        layer = _Layer(
            hidden=config.hidden,
            attended_width=config.heads * config.head_dim,
            experts=config.experts,
            top_k=config.top_k,
            width=config.intermediate,
            sum_to_one=config.weights_sum_to_one,
            norm=self._norm(weights["ffn_norm"][0]),
        )
        if "o" in weights:
            layer.output_weights = _held(weights["o"], held)
        if "router" in weights:
            layer.router = _held(weights["router"], held)
        names = [
            f"experts.{expert}.{part}" for expert in range(config.experts) for part in ("gate", "up", "down")
        ]
        if all(name in weights for name in names):
            held.append(array("q", [_held(weights[name], held) for name in names]))
            layer.expert_weights = address(held[-1])
        return layer

    def _head(self, head: LayerWeights, held: list[array[int]]) -> _Head:
        blocks = head["lm_head"]
        vocabulary = sum(len(block) for block in blocks)
        return _Head(hidden=self._config.hidden, vocabulary=vocabulary, weights=_held(blocks, held))

    def _norm(self, weight_D: Tensor) -> _Norm:
        return _Norm(weight_D.data_ptr(), self._config.norm_eps, self._config.norm == "layer")


def _held(blocks: Blocks, held: list[array[int]]) -> int:
    """Where C finds the row blocks, as long as they are held."""
    held.append(rows_of(blocks))
    return address(held[-1])

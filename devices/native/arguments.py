"""Arguments of the native calls, with pointers to a layer's weights that are prepared once and kept with them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping
from itertools import count
from types import MappingProxyType
from typing import TypeVar

from moesched.models import layers
from moesched.models.config import ModelConfig

from .kernels import Blocks, Tensor, address, rows_of

_NUMBER, _POINTER, _REAL = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
_numbers = count()


class Norm(ctypes.Structure):
    """As in norm.h."""

    _fields_ = (("weight", _POINTER), ("epsilon", _REAL), ("subtracts_mean", _NUMBER))


class Tokens(ctypes.Structure):
    """As in embedding.c."""

    _fields_ = (
        *((name, _NUMBER) for name in ("tokens", "hidden", "head_dim")),
        *(
            (name, _POINTER)
            for name in ("ids", "positions", "embedding", "frequencies", "x", "cosines", "sines")
        ),
    )


class Inputs(ctypes.Structure):
    """As in attention_inputs.c."""

    _fields_ = (
        *((name, _NUMBER) for name in ("tokens", "hidden", "heads", "kv_heads", "head_dim")),
        ("x", _POINTER),
        ("norm", Norm),
        *((name, _POINTER) for name in ("weights", "query_norm", "key_norm")),
        *((name, _NUMBER) for name in ("query_normed", "key_normed")),
        ("clip", _REAL),
        *((name, _POINTER) for name in ("cosines", "sines", "queries", "keys", "values")),
    )


class Attend(ctypes.Structure):
    """As in attention.h."""

    _fields_ = (
        *(
            (name, _NUMBER)
            for name in ("number_bytes", "sequences", "heads", "kv_heads", "head_dim", "window")
        ),
        *((name, _NUMBER) for name in ("block_size", "query_stride", "new_stride")),
        ("scale", _REAL),
        *((name, _POINTER) for name in ("lengths", "blocks", "keys", "values", "queries", "new_keys")),
        *((name, _POINTER) for name in ("new_values", "out")),
    )


class NewRows(ctypes.Structure):
    """As in kv_rows.c."""

    _fields_ = (
        *((name, _NUMBER) for name in ("tokens", "row_bytes")),
        *((name, _POINTER) for name in ("slots", "keys", "values", "new_keys", "new_values")),
    )


class Prompts(ctypes.Structure):
    """As in prompt_attention.c."""

    _fields_ = (
        *((name, _NUMBER) for name in ("sequences", "queries", "length", "heads", "kv_heads", "head_dim")),
        *((name, _NUMBER) for name in ("window", "sequence_stride", "token_stride", "head_stride")),
        ("scale", _REAL),
        *((name, _POINTER) for name in ("keys", "values", "new_queries", "out")),
    )


class Layer(ctypes.Structure):
    """As in moe_layer.c."""

    _fields_ = (
        *((name, _NUMBER) for name in ("tokens", "hidden", "attended_width", "experts", "top_k", "width")),
        ("sum_to_one", _NUMBER),
        *((name, _POINTER) for name in ("attended", "residual", "output_weights")),
        ("norm", Norm),
        *((name, _POINTER) for name in ("router", "expert_weights", "projected", "x", "logits", "chosen")),
        *((name, _POINTER) for name in ("weights", "counts", "out")),
    )


class Head(ctypes.Structure):
    """As in logits.c."""

    _fields_ = (
        *((name, _NUMBER) for name in ("rows", "hidden", "vocabulary")),
        *((name, _POINTER) for name in ("x", "chosen")),
        ("norm", Norm),
        *((name, _POINTER) for name in ("weights", "logits", "likeliest")),
    )


A = TypeVar("A", bound=ctypes.Structure)
Held = list["array[int]"]
"""Arrays that arguments point to."""


class LayerWeights(dict[str, list[Tensor]]):
    """The tensors of a layer by name, as row blocks, with what the kernels keep of them.

    Attributes:
        layer: describes their layer; only weights outside the layers have none.
        number: of no other weights.
        plain: whether all matrices are plain row blocks; None until a kernel asks.
    """

    layer: layers.Layer

    def __init__(self, blocks: Mapping[str, Blocks] = MappingProxyType({})) -> None:
        super().__init__({name: list(each) for name, each in blocks.items()})
        self.number = next(_numbers)
        self.plain: bool | None = None
        self._prepared: dict[type[ctypes.Structure], tuple[ctypes.Structure, Held]] = {}

    def arguments(self, kind: type[A], prepare: Callable[[LayerWeights, Held], A]) -> A:
        """A copy of the arguments of one kind, which are prepared when they are first asked for."""
        if kind not in self._prepared:
            held: Held = []
            self._prepared[kind] = prepare(self, held), held
        return kind.from_buffer_copy(self._prepared[kind][0])


class Preparation:
    """Fills in what depends on the model and its weights."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def inputs(self, weights: LayerWeights, held: Held) -> Inputs:
        """Of `moesched_attention_inputs`."""
        attention = weights.layer.grouped
        inputs = Inputs(
            hidden=self._config.hidden,
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            norm=self._norm(weights["attention_norm"][0]),
            weights=_held(weights["qkv"], held),
            clip=attention.clip or 0.0,
        )
        if attention.qk_norm:
            query, key = weights["q_norm"][0], weights["k_norm"][0]
            inputs.query_norm, inputs.query_normed = query.data_ptr(), len(query)
            inputs.key_norm, inputs.key_normed = key.data_ptr(), len(key)
        return inputs

    def layer(self, weights: LayerWeights, held: Held) -> Layer:
        """Of `moesched_route` and `moesched_moe_layer`."""
        network = weights.layer.feed_forward
        layer = Layer(
            hidden=self._config.hidden,
            attended_width=weights.layer.attention.attended_width,
            experts=network.experts,
            top_k=network.top_k,
            width=network.intermediate,
            sum_to_one=network.weights_sum_to_one,
            norm=self._norm(weights["ffn_norm"][0]),
        )
        if "o" in weights:
            layer.output_weights = _held(weights["o"], held)
        if "router" in weights:
            layer.router = _held(weights["router"], held)
        names = [
            f"experts.{expert}.{part}" for expert in range(network.experts) for part in ("gate", "up", "down")
        ]
        if all(name in weights for name in names):
            held.append(array("q", [_held(weights[name], held) for name in names]))
            layer.expert_weights = address(held[-1])
        return layer

    def head(self, weights: LayerWeights, held: Held) -> Head:
        """Of `moesched_logits`."""
        blocks = weights["lm_head"]
        vocabulary = sum(len(block) for block in blocks)
        return Head(
            hidden=self._config.hidden,
            vocabulary=vocabulary,
            norm=self._norm(weights["final_norm"][0]),
            weights=_held(blocks, held),
        )

    def _norm(self, weight_D: Tensor) -> Norm:
        return Norm(weight_D.data_ptr(), self._config.norm_eps, self._config.norm == "layer")


def _held(blocks: Blocks, held: Held) -> int:
    """The address of the row blocks, which are kept in `held`."""
    held.append(rows_of(blocks))
    return address(held[-1])

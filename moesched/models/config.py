"""The configuration of a model, for kernels and the planner."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Literal

import msgspec
from msgspec.structs import replace

from moesched.models.formats import EXPERT_ROLES, FORMATS, Format, Role, role_of
from moesched.models.layers import FeedForward, GroupedAttention, HeadNorm, Layer, Shape, representative

DType = Literal["float32", "bfloat16", "float16"]
NormKind = Literal["rms", "layer"]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a model and the variants of its operations; flat, because config.json is.

    Sizes are in elements. A dense model has one expert and no router. All layers are alike, unless there is a pattern;
    then heads to top_k are those of the pattern's last layer, and `layer` has those of each.

    Attributes:
        stop_tokens: tokens that end a sequence.
        dtype: the default dtype of computation.
        norm: "rms" divides by the root mean square, "layer" normalises by mean and variance.
        clip_qkv: the largest magnitude of queries, keys and values; None does not clip.
        qk_norm: RMS norm of queries and keys: of each head, or of the whole projection; None for none.
        weights_sum_to_one: whether the weights of a token's experts are a softmax over those experts; otherwise they
            are taken from a softmax over all experts.
        form: the architecture, by its key in `ARCHITECTURES`; it names the tensors of checkpoints.
        transposed_down: whether checkpoints store the experts' down matrices as (inputs, outputs).
        pattern: the kinds of all layers, for models whose layers differ or have parts that the kernels lack; these are
            only simulated. Empty for models that also run.
        format: the storage format of the weights, a key of `FORMATS`; None for plain weights in the dtype of the
            computation.
        expert_format: the format that experts keep where the other weights have one of fewer than 16 bits.
        unused_weights: weights in the published files that generating text does not need: extra prediction layers,
            and encoders of pictures.
        ranks: the tensor-parallel ranks (see `tensor_parallel.py`). heads, kv_heads and intermediate are those of one
            rank, all other sizes are of the whole model.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    vocabulary: int
    norm_eps: float
    rope_theta: float
    sliding_window: int | None
    max_positions: int
    tied_embeddings: bool
    stop_tokens: tuple[int, ...]
    dtype: DType
    norm: NormKind = "rms"
    clip_qkv: float | None = None
    qk_norm: HeadNorm | None = None
    weights_sum_to_one: bool = True
    form: str = "mixtral"
    transposed_down: bool = False
    pattern: tuple[Layer, ...] = ()
    format: str | None = None
    expert_format: str | None = None
    unused_weights: int = 0
    ranks: int = 1

    def layer(self, number: int) -> Layer:
        """The attention and the feed-forward network of a layer."""
        return self.pattern[number] if self.pattern else _uniform(self)

    @property
    def typical_layer(self) -> Layer:
        """The last layer, which has routed experts in every MoE model."""
        return self.layer(self.layers - 1)

    @property
    def kinds(self) -> Mapping[Layer, int]:
        """The different kinds of layers, in the order of their first use, and the number of layers of each."""
        if not self.pattern:
            return MappingProxyType({_uniform(self): self.layers})
        counts: dict[Layer, int] = {}
        for layer in self.pattern:
            counts[layer] = counts.get(layer, 0) + 1
        return MappingProxyType(counts)

    def cut(self, layers: int) -> ModelConfig:
        """A shorter model, in which each kind of layer has about its share of the whole, and at least one layer."""
        if not self.pattern:
            return replace(self, layers=min(layers, self.layers))
        chosen = representative(self.pattern, layers)
        return replace(self, layers=len(chosen), pattern=tuple(self.pattern[number] for number in chosen))

    def weight_bytes(self, role: Role, row: int, dtype: str) -> float:
        """Bytes per weight of tensors of a role with rows of `row` items.

        dtype: that of the computation, and of plain weights.
        """
        stored = self._format_of(role)
        return ITEM_BYTES[dtype] if stored is None else stored.bytes_per_weight(role, row)

    def tensor_bytes(self, name: str, shape: Shape, dtype: str) -> float:
        """Bytes per weight of a tensor, by its canonical name; `dtype` as in `weight_bytes`."""
        return self.weight_bytes(role_of(name), shape[-1], dtype)

    def kernel_rate(self, role: Role) -> float:
        """The kernel rate of products with tensors of a role (see `Format`)."""
        stored = self._format_of(role)
        return 1.0 if stored is None else stored.rate(role)

    def _format_of(self, role: Role) -> Format | None:
        name = self.format
        if self.expert_format is not None and role in EXPERT_ROLES and name not in (None, "bf16"):
            name = self.expert_format
        return None if name is None else FORMATS[name]


@cache
def _uniform(config: ModelConfig) -> Layer:
    """The one kind of layer of a model without a pattern."""
    return Layer(
        attention=GroupedAttention(
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            window=config.sliding_window,
            norm=config.qk_norm,
        ),
        feed_forward=FeedForward(
            experts=config.experts, top_k=config.top_k, intermediate=config.intermediate
        ),
    )

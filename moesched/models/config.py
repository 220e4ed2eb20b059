"""The configuration of a model, for kernels and the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import cycle, islice
from types import MappingProxyType
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from moesched.models.formats import CODED_RATES, EXPERT_ROLES, FORMATS, Format, Role, role_of
from moesched.models.layers import Formats, GroupedAttention, Layer, representative
from moesched.models.networks import FeedForward
from moesched.models.stored_formats import CODED, PLAIN, STORED_FORMATS, StoredFormat
from moesched.models.tensor_shapes import Shape

DType = Literal["float32", "bfloat16", "float16"]
NormKind = Literal["rms", "layer"]

ITEM_BYTES = {name: STORED_FORMATS[name].block_bytes for name in PLAIN}
"""Bytes of a number, by dtype."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """The shape of a model: a description of each layer, and what all layers share.

    Sizes are in elements. A dense model that runs has one expert and no router.

    Attributes:
        pattern: the layers, from first to last.
        norm: "rms" divides by the root mean square, "layer" normalises by mean and variance.
        stop_tokens: tokens that end a sequence.
        dtype: the default dtype of computation.
        form: the architecture, by its key in `ARCHITECTURES`; it names the tensors of checkpoints.
        format: the storage format of the weights of a model that is only simulated, a key of `FORMATS`; None for plain
            weights in the dtype of the computation, but for those that `formats` has.
        formats: the storage formats of tensors outside the layers that keep them; layers have their own.
        expert_format: the format that experts keep where the other weights have one of fewer than 16 bits.
        embedding_factor, residual_factor, logits_factor: multiply the embeddings, the output of attention that is added
            to the residual (the experts' is multiplied by their weights' scale), and the logits.
        unused_weights: number of weights in the published files that generating text does not need: extra prediction
            layers, and encoders of pictures.
        ranks: number of tensor-parallel ranks (see `tensor_parallel.py`). Heads and inner widths of the layers are
            those of one rank, all other sizes are of the whole model.
    """

    name: str
    pattern: tuple[Layer, ...]
    hidden: int
    vocabulary: int
    norm_eps: float
    max_positions: int
    tied_embeddings: bool
    stop_tokens: tuple[int, ...]
    dtype: DType
    norm: NormKind = "rms"
    form: str = "mixtral"
    format: str | None = None
    expert_format: str | None = None
    formats: Formats = ()
    embedding_factor: float = 1.0
    residual_factor: float = 1.0
    logits_factor: float = 1.0
    unused_weights: int = 0
    ranks: int = 1

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.pattern)

    def layer(self, number: int) -> Layer:
        """The attention and the feed-forward network of a layer."""
        return self.pattern[number]

    @property
    def typical_layer(self) -> Layer:
        """The last layer, which has softmax attention, and routed experts in every MoE model."""
        return self.pattern[-1]

    @property
    def attention(self) -> GroupedAttention:
        """The attention of the last layer; in models that run (`require_runs`) all layers have its numbers of heads."""
        return self.typical_layer.grouped

    @property
    def routed(self) -> FeedForward:
        """The feed-forward network of the last layer; all layers with routed experts have the same ones."""
        return self.typical_layer.feed_forward

    @property
    def kinds(self) -> Mapping[Layer, int]:
        """The different kinds of layers, in the order of their first use, and the number of layers of each."""
        return MappingProxyType(Counter(self.pattern))

    def by_window(self, layers: Iterable[int]) -> list[list[int]]:
        """Group layers, given by number, by their window: the caches of a group keep the same tokens."""
        groups: dict[int | None, list[int]] = {}
        for layer in layers:
            groups.setdefault(self.layer(layer).grouped.window, []).append(layer)
        return list(groups.values())

    def cut(self, layers: int) -> ModelConfig:
        """A shorter model, in which each kind of layer has about its share of the whole, and at least one layer."""
        chosen = representative(self.pattern, layers)
        return replace(self, pattern=tuple(self.pattern[number] for number in chosen))

    def varied(self, layers: int | None = None, **settings: Any) -> ModelConfig:
        """The model with other settings: its own, and else those of every layer, as by `Layer.varied`.

        layers: number of layers; a longer model repeats the pattern, a shorter one has the first layers.
        """
        own = {name: settings.pop(name) for name in self.__struct_fields__ if name in settings}
        kinds = {kind: kind.varied(**settings) for kind in self.kinds}
        count = self.layers if layers is None else layers
        pattern = tuple(kinds[kind] for kind in islice(cycle(self.pattern), count))
        return replace(self, **{"pattern": pattern, **own})

    def weight_bytes(self, role: Role, row: int, dtype: str) -> float:
        """Bytes per weight of tensors of a role with rows of `row` items.

        dtype: dtype of the computation, and of plain weights.
        """
        stored = self._format_of(role)
        return ITEM_BYTES[dtype] if stored is None else stored.bytes_per_weight(role, row)

    def tensor_bytes(self, name: str, shape: Shape, dtype: str, layer: Layer | None = None) -> float:
        """Bytes per weight of a tensor, by its canonical name, or its name in a layer; `dtype` as in `weight_bytes`."""
        kept = self.kept_format(name, layer)
        return self.weight_bytes(role_of(name), shape[-1], dtype) if kept is None else kept.bytes_per_weight

    def kept_format(self, name: str, layer: Layer | None = None) -> StoredFormat | None:
        """The storage format that a tensor keeps in memory, by its canonical name, or its name in a layer.

        It is None for a tensor that has the dtype of the computation.
        """
        if name.startswith("layers."):
            layer = self.pattern[int(name.split(".", 2)[1])]
        formats = self.formats if layer is None else (*layer.formats, *self.formats)
        if not formats:
            return None
        tensor = tensor_in_layer(name)
        return next((STORED_FORMATS[stored] for kept, stored in formats if kept == tensor), None)

    @property
    def coded_formats(self) -> tuple[str, ...]:
        """The names of the coded formats of all tensors, sorted."""
        pairs = {*self.formats, *(pair for layer in self.kinds for pair in layer.formats)}
        return tuple(sorted({stored for _, stored in pairs}.intersection(CODED)))

    def kernel_rate(self, name: str, layer: Layer | None = None) -> float:
        """The share of a processor's FLOP/s that products with a tensor reach (see `Format`).

        name: the tensor's canonical name, or its name in a layer.
        """
        kept = self.kept_format(name, layer)
        if kept is not None:
            return CODED_RATES.get(kept.name, 1.0)
        role = role_of(name)
        stored = self._format_of(role)
        return 1.0 if stored is None else stored.rate(role)

    def _format_of(self, role: Role) -> Format | None:
        name = self.format
        if self.expert_format is not None and role in EXPERT_ROLES and name not in (None, "bf16"):
            name = self.expert_format
        return None if name is None else FORMATS[name]


def tensor_in_layer(name: str) -> str:
    """The key of a tensor in `Layer.formats`: without numbers of layer and expert."""
    parts = name.split(".")
    return f"experts.{parts[-1]}" if "experts" in parts else parts[-1]

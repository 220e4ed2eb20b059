"""ModelConfig: the configuration of a model, which kernels, planner and simulator read."""

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

    Sizes are in elements. To run on devices, a dense model is described as having one expert and no router.

    Attributes:
        pattern: the layers, from first to last.
        norm: "rms" divides by the root mean square, "layer" normalises by mean and variance.
        stop_tokens: ids of tokens that end a sequence.
        dtype: the default dtype of computation.
        form: the architecture, by its key in `ARCHITECTURES`; it decides how checkpoints name tensors.
        format: storage format of a simulated model's weights, as a key of `FORMATS`; devices do not run such models.
            With None, weights are in the dtype of the computation, except for tensors listed in `formats` here and in
            the layers.
        formats: pairs (name, storage format) of tensors outside the layers, for those that are kept in memory in
            another format than the dtype of the computation.
        expert_format: storage format of a simulated model's experts; None for the same as `format`. It has no effect
            if `format` is None or "bf16".
        embedding_factor: number that multiplies the embeddings.
        residual_factor: number that multiplies the attention output before it is added to the residual; for expert
            outputs, see `Router.scale`.
        logits_factor: number that multiplies the logits.
        unused_weights: number of weights in the published files that generating text does not need: extra prediction
            layers, and vision encoders.
        ranks: number of tensor-parallel ranks (see `tensor_parallel.py`). Heads and inner widths of the layers are for
            one rank, all other sizes for the whole model.
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
        """Return the description of the layer with this number."""
        return self.pattern[number]

    @property
    def typical_layer(self) -> Layer:
        """The last layer: it never has linear attention, and in every MoE model it has routed experts."""
        return self.pattern[-1]

    @property
    def attention(self) -> GroupedAttention:
        """The attention of the last layer.

        In models that devices can run (`require_runs`), all layers have the same number of heads.
        """
        return self.typical_layer.grouped

    @property
    def routed(self) -> FeedForward:
        """The feed-forward network of the last layer; all layers with routed experts have the same kind of experts."""
        return self.typical_layer.feed_forward

    @property
    def kinds(self) -> Mapping[Layer, int]:
        """For each different kind of layer, in the order of first use, the number of layers of this kind."""
        return MappingProxyType(Counter(self.pattern))

    def by_window(self, layers: Iterable[int]) -> list[list[int]]:
        """Group layers, given by number, by the length of their attention window.

        The layers of a group keep the KV cache of the same tokens.
        """
        groups: dict[int | None, list[int]] = {}
        for layer in layers:
            groups.setdefault(self.layer(layer).grouped.window, []).append(layer)
        return list(groups.values())

    def cut(self, layers: int) -> ModelConfig:
        """Return a configuration with `layers` layers, chosen by `representative`: each kind keeps about its share."""
        chosen = representative(self.pattern, layers)
        return replace(self, pattern=tuple(self.pattern[number] for number in chosen))

    def varied(self, layers: int | None = None, **settings: Any) -> ModelConfig:
        """Return a copy of the configuration with other settings.

        Args:
            layers: number of layers; more layers repeat the pattern, fewer layers are the first ones; None for as many
                as before.
            settings: values by name; names that ModelConfig does not have are fields of every layer, as in
                `Layer.varied`.
        """
        own = {name: settings.pop(name) for name in self.__struct_fields__ if name in settings}
        kinds = {kind: kind.varied(**settings) for kind in self.kinds}
        count = self.layers if layers is None else layers
        pattern = tuple(kinds[kind] for kind in islice(cycle(self.pattern), count))
        return replace(self, **{"pattern": pattern, **own})

    def weight_bytes(self, role: Role, row: int, dtype: str) -> float:
        """Return the bytes per weight of a simulated model's tensors.

        Args:
            role: role of the tensors in a layer, such as "down".
            row: number of weights of a row.
            dtype: dtype of the computation, and of plain weights.
        """
        stored = self._format_of(role)
        return ITEM_BYTES[dtype] if stored is None else stored.bytes_per_weight(role, row)

    def tensor_bytes(self, name: str, shape: Shape, dtype: str, layer: Layer | None = None) -> float:
        """Return the bytes per weight of a tensor.

        Args:
            name: canonical name of the tensor, or, with `layer`, its name in that layer.
            shape: shape of the tensor.
            dtype: dtype of the computation, and of plain weights.
        """
        kept = self.kept_format(name, layer)
        return self.weight_bytes(role_of(name), shape[-1], dtype) if kept is None else kept.bytes_per_weight

    def kept_format(self, name: str, layer: Layer | None = None) -> StoredFormat | None:
        """Return the storage format that a tensor keeps in memory; None for the dtype of the computation.

        Args:
            name: canonical name of the tensor, or, with `layer`, its name in that layer.
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
        """The names of all coded (quantised) formats that tensors have in memory, sorted."""
        pairs = {*self.formats, *(pair for layer in self.kinds for pair in layer.formats)}
        return tuple(sorted({stored for _, stored in pairs}.intersection(CODED)))

    def kernel_rate(self, name: str, layer: Layer | None = None) -> float:
        """Return the share (0 to 1) of a processor's FLOP/s that matrix products with a tensor reach.

        The share is below 1 for formats that kernels first convert.

        Args:
            name: canonical name of the tensor, or, with `layer`, its name in that layer.
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
    """Return a tensor's name in its layer, without numbers of layer and expert; this is its key in `Layer.formats`.

    Args:
        name: canonical name of the tensor, such as "layers.0.experts.3.up".
    """
    parts = name.split(".")
    return f"experts.{parts[-1]}" if "experts" in parts else parts[-1]

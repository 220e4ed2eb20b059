"""Makes headers of GGUF files: metadata of the model without a tokenizer, and the place of each tensor."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import cycle, islice, takewhile
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.models.formats import role_of
from moesched.models.gguf.families import GGUF_FAMILIES, GgufFamily, architecture_of
from moesched.models.gguf.header import ALIGNMENT, FLAG, FLOAT32, MAGIC, TEXT, UNSIGNED, VERSIONS
from moesched.models.gguf.keys import SIGMOID, GgufKeys
from moesched.models.gguf.tensor_names import gguf_tensors
from moesched.models.gguf.types import TENSOR_TYPES
from moesched.models.published import with_shapes
from moesched.models.rotary import Linear, Yarn
from moesched.models.stored_formats import STORED_FORMATS
from moesched.models.written_tensor import WrittenTensor

NO_TOKENIZER = "no_vocab"

_NUMBERS = {each.stored.name: number for number, each in TENSOR_TYPES.items() if each.stored is not None}
"""Numbers of types in GGUF files, by storage format."""


class WrittenHeader(NamedTuple):
    """The header of a GGUF file to be written, and the places of its tensors.

    Attributes:
        data: the bytes of the header, up to the first tensor.
        starts: for each tensor, in order, its offset in the file in bytes.
        size: size of the file in bytes.
    """

    data: bytes
    starts: list[int]
    size: int


def gguf_tensors_of(config: ModelConfig) -> Iterator[WrittenTensor]:
    """Yield the tensors to write to a model's GGUF file; norms, biases and routers are in float32."""
    plain = STORED_FORMATS[config.dtype]
    family = GGUF_FAMILIES[architecture_of(config)]
    for name, tensor in with_shapes(config, gguf_tensors(family, config)).items():
        first = tensor.parts[0][0]
        is_small = role_of(first) == "small"
        stored = STORED_FORMATS["float32"] if is_small else config.kept_format(first) or plain
        yield WrittenTensor(name, tensor.shape, stored)


def written_header(config: ModelConfig, tensors: Sequence[WrittenTensor]) -> WrittenHeader:
    """Return the header of a GGUF file with these tensors."""
    architecture = architecture_of(config)
    keys = msgspec.to_builtins(gguf_keys(config))
    metadata = {
        "general.architecture": architecture,
        "general.name": config.name,
        **{f"{architecture}.{key}": value for key, value in keys.items() if value is not None},
        "tokenizer.ggml.model": NO_TOKENIZER,
    }
    data = bytearray(struct.pack("<IIQQ", MAGIC, VERSIONS[-1], len(tensors), len(metadata)))
    for key, value in metadata.items():
        data += _text(key) + _value(value)
    offsets, end = [], 0
    for tensor in tensors:
        data += _text(tensor.name) + struct.pack(
            f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape)
        )
        data += struct.pack("<IQ", _NUMBERS[tensor.stored.name], end)
        offsets.append(end)
        end = _aligned(end + tensor.nbytes)
    data += bytes(_aligned(len(data)) - len(data))
    return WrittenHeader(bytes(data), [len(data) + offset for offset in offsets], len(data) + end)


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: str | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", TEXT) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", FLAG, value)
    return (
        struct.pack("<If", FLOAT32, value)
        if isinstance(value, float)
        else struct.pack("<II", UNSIGNED, value)
    )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def gguf_keys(config: ModelConfig) -> GgufKeys:
    """Return the metadata that describe a model.

    Raises:
        BadInput: layers differ in more than the formats of their weights, or no key describes the rotary embedding.
    """
    family, dense = GGUF_FAMILIES[architecture_of(config)], _dense_layers(config)
    _require_described(config, family, dense)
    attention, network, router = config.layer(0).grouped, config.routed, config.routed.router
    by_mean = config.norm == "layer"
    return GgufKeys(
        vocab_size=config.vocabulary,
        block_count=config.layers,
        context_length=config.max_positions,
        embedding_length=config.hidden,
        feed_forward_length=config.layer(0).feed_forward.shared if dense else network.intermediate,
        attention__head_count=attention.heads,
        attention__head_count_kv=attention.kv_heads,
        attention__key_length=attention.head_dim,
        attention__value_length=attention.head_dim,
        attention__layer_norm_rms_epsilon=None if by_mean else config.norm_eps,
        attention__layer_norm_epsilon=config.norm_eps if by_mean else None,
        attention__clamp_kqv=attention.clip,
        attention__sliding_window=attention.window,
        attention__scale=attention.scale,
        embedding_scale=_unless_one(config.embedding_factor),
        residual_scale=_unless_one(config.residual_factor),
        logit_scale=_unless_one(1 / config.logits_factor),
        rope__dimension_count=attention.rotary.turning(attention.head_dim),
        rope__freq_base=attention.rotary.theta,
        **_scaling(config, family),
        expert_count=network.experts if network.experts > 1 else 0,
        expert_used_count=network.top_k if network.experts > 1 else 0,
        expert_feed_forward_length=network.intermediate,
        expert_shared_count=network.shared // network.intermediate or None,
        expert_gating_func=SIGMOID if router.score == "sigmoid" else None,
        expert_weights_norm=router.normalised if network.shared else None,
        expert_weights_scale=router.scale if network.shared else None,
        expert_group_count=router.groups if router.groups > 1 else None,
        expert_group_used_count=router.kept_groups if router.groups > 1 else None,
        leading_dense_block_count=dense or None,
    )


def _require_described(config: ModelConfig, family: GgufFamily, dense: int) -> None:
    """Check that the metadata of a family can describe a model's layers.

    Args:
        dense: number of layers without experts at the start of the model.

    Raises:
        BadInput: layers differ that have to be alike, or the experts' activation is not the family's.
    """
    first, network = config.layer(0).grouped, config.routed
    turns = cycle((first.window, None) if family.windows_in_turn else (first.window,))
    attentions = [replace(first, window=window) for window in islice(turns, config.layers)]
    if [layer.attention for layer in config.pattern] != attentions or any(
        layer.feed_forward != network for layer in config.pattern[dense:]
    ):
        raise BadInput(
            f"{config.name} has layers that differ, which no GGUF file describes: use layers that are alike"
        )
    if network.activation != family.activation:
        raise BadInput(
            f"{config.name} has experts with {network.activation}, and GGUF files of the family have "
            f"{family.activation}: name a folder"
        )


def _dense_layers(config: ModelConfig) -> int:
    """Return the number of layers without experts at the start; 0 in families whose layers all have experts."""
    family, first = GGUF_FAMILIES[architecture_of(config)], config.layer(0)
    if not family.dense_first or first.feed_forward.experts:
        return 0
    return sum(1 for _ in takewhile(lambda layer: layer == first, config.pattern))


def _scaling(config: ModelConfig, family: GgufFamily) -> dict[str, Any]:
    scaling = config.attention.rotary.scaling
    if scaling is None:
        return {"rope__scaling__type": "none"}
    kind = scaling.__struct_config__.tag
    keys = {"rope__scaling__type": kind, "rope__scaling__factor": scaling.factor}
    if isinstance(scaling, Linear):
        return keys
    if isinstance(scaling, Yarn):
        if scaling.truncate == family.truncate:
            return keys | {
                "rope__scaling__original_context_length": scaling.original_max_position_embeddings,
                "rope__scaling__yarn_beta_fast": scaling.beta_fast,
                "rope__scaling__yarn_beta_slow": scaling.beta_slow,
            }
        kind = f"{kind}, truncate={scaling.truncate}"
    raise BadInput(
        f"{config.name}: GGUF files with a rotation scaled by {kind} are not written: name a folder"
    )


def _unless_one(factor: float) -> float | None:
    return None if factor == 1 else factor

"""Models whose matrices stay quantised in memory, in the formats of their files; norms and routers are in float32."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.models.config import ModelConfig, tensor_in_layer
from moesched.models.formats import role_of
from moesched.models.layers import Formats
from moesched.models.stored_formats import CODED, STORED_FORMATS, StoredFormat
from moesched.models.tensor_shapes import Shape
from moesched.models.tensors import dense_shapes, expert_shapes, global_shapes, is_transposed
from moesched.system.near_names import with_nearest

METHOD = "moesched"
"""The `quant_method` in the config.json of a model with coded weights."""

FLOAT32 = STORED_FORMATS["float32"]


class Mix(NamedTuple):
    """The two storage formats that a model's matrices have in files which mix formats, as those of llama.cpp do.

    Attributes:
        most: name of the format of most matrices.
        favoured: name of the format of the LM head, and of value and down projections in half of the layers.
    """

    most: str
    favoured: str


MIXES: Mapping[str, Mix] = MappingProxyType(
    {
        **{name: Mix(name, name) for name in CODED},
        "q4_k_m": Mix("q4_k", "q6_k"),
        "q5_k_m": Mix("q5_k", "q6_k"),
    }
)
"""All mixes, by name: single coded formats, and those of llama.cpp's files."""
INSTEAD: Mapping[str, str] = MappingProxyType({"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"})
"""Formats by the format that they replace, in matrices whose rows are no multiple of 256 weights."""


def coded_as(config: ModelConfig, name: str) -> ModelConfig:
    """Return a copy of a model's configuration with matrices in quantised formats, norms and routers in float32.

    Matrices that are stored transposed, or whose rows are not whole blocks, stay plain.

    Args:
        name: a key of `MIXES`: the name of a coded format, or of a mix of formats.

    Raises:
        BadInput: there is no such format.
    """
    if name not in MIXES:
        remedy = with_nearest(name, MIXES, f"choose one of {', '.join(MIXES)}")
        raise BadInput(f"no kernel reads weights in {name!r}: {remedy}")
    mix = MIXES[name]
    pattern = tuple(
        replace(
            layer,
            formats=_formats(
                config,
                dense_shapes(config, number) | expert_shapes(config, number, 0),
                mix if _is_favoured(number, config.layers) else Mix(mix.most, mix.most),
            ),
        )
        for number, layer in enumerate(config.pattern)
    )
    return replace(config, pattern=pattern, formats=_formats(config, global_shapes(config), mix))


def with_formats(config: ModelConfig, formats: Mapping[str, StoredFormat]) -> ModelConfig:
    """Return a copy of a model's configuration that lists the tensors which are not converted to the model's dtype.

    Quantised tensors are listed in the files' format. Small tensors (norms, biases, routers and the like) are listed as
    float32 if the files have them in float32, and any matrix in another format. Small tensors in float16 count as
    float32, which holds all their values, unless the model's dtype is float32.

    Args:
        formats: for each canonical name of a tensor, the format in the files.

    Raises:
        BadInput: a matrix is in a coded format in one expert of a layer, and in another format in another expert.
    """
    wide = {FLOAT32.name} if config.dtype == FLOAT32.name else {FLOAT32.name, "float16"}
    narrow = any(stored != FLOAT32 and role_of(name) != "small" for name, stored in formats.items())
    coded = any(stored.codes is not None for stored in formats.values())
    layers: list[dict[str, StoredFormat]] = [{} for _ in config.pattern]
    outside: dict[str, StoredFormat] = {}
    for name, stored in formats.items():
        if coded or stored.name in wide:
            kept = layers[int(name.split(".", 2)[1])] if name.startswith("layers.") else outside
            first = kept.setdefault(tensor_in_layer(name), stored)
            if first != stored and (first.codes or stored.codes):
                raise BadInput(
                    f"{config.name}: {name} is in {stored.name}, and that of another expert in {first.name}: use files "
                    "in which a layer's experts are alike"
                )

    def kept_of(found: Mapping[str, StoredFormat]) -> Formats:
        return tuple(
            sorted(
                (tensor, stored.name if stored.codes else FLOAT32.name)
                for tensor, stored in found.items()
                if stored.codes or (stored.name in wide and narrow and role_of(tensor) == "small")
            )
        )

    pattern = tuple(
        replace(layer, formats=kept_of(found)) for layer, found in zip(config.pattern, layers, strict=True)
    )
    return replace(config, pattern=pattern, formats=kept_of(outside))


def quantization_config(config: ModelConfig) -> dict[str, object]:
    """Return the key and value of config.json that describe the weights' coded formats; empty for plain weights.

    Raises:
        BadInput: no mix in `MIXES` has the formats of these weights.
    """
    if not config.coded_formats:
        return {}
    for name in MIXES:
        if coded_as(config, name) == config:
            return {"quantization_config": {"quant_method": METHOD, "format": name}}
    raise BadInput(
        f"no config.json describes {config.name}, with weights in {', '.join(config.coded_formats)}: "
        f"use one of {', '.join(MIXES)}"
    )


def _formats(config: ModelConfig, shapes: Mapping[str, Shape], mix: Mix) -> Formats:
    found = {name: _format(config, name, shape, mix) for name, shape in shapes.items()}
    kept = {tensor_in_layer(name): each.name for name, each in found.items() if each is not None}
    return tuple(sorted(kept.items()))


def _format(config: ModelConfig, name: str, shape: Shape, mix: Mix) -> StoredFormat | None:
    """Return the format in which a tensor is kept in memory; None for the dtype of the computation."""
    role = role_of(name)
    if role == "small":
        return FLOAT32
    if is_transposed(config, name):
        return None
    is_head = role == "head" or (role == "embedding" and config.tied_embeddings)
    chosen = mix.favoured if is_head or role in ("value", "down", "expert_down") else mix.most
    fitting = [STORED_FORMATS[each] for each in (chosen, INSTEAD.get(chosen, chosen))]
    return next((each for each in fitting if each.fits(shape)), None)


def _is_favoured(layer: int, layers: int) -> bool:
    """Test whether llama.cpp gives a layer's value and down matrices more bits per weight (`use_more_bits`).

    These layers are the first and last eighth, and every third layer between.

    Args:
        layers: number of layers of the model.
    """
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2

"""Models whose matrices are stored in a coded format."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.models.config import ModelConfig, tensor_in_layer
from moesched.models.formats import role_of
from moesched.models.layers import Formats, Shape
from moesched.models.stored_formats import CODED, STORED_FORMATS, StoredFormat
from moesched.models.tensors import dense_shapes, expert_shapes, global_shapes, is_transposed
from moesched.system.near_names import with_nearest

METHOD = "moesched"
"""The `quant_method` in config.json of such a model."""


def coded_as(config: ModelConfig, name: str) -> ModelConfig:
    """The model with its matrices in a coded format.

    Routers stay plain, and so do matrices that are stored transposed or whose rows are no whole blocks.

    Raises:
        BadInput: there is no such format.
    """
    if name not in CODED:
        remedy = with_nearest(name, CODED, f"choose one of {', '.join(CODED)}")
        raise BadInput(f"no kernel reads weights in {name!r}: {remedy}")
    stored = STORED_FORMATS[name]
    numbers = {layer: number for number, layer in enumerate(config.pattern)}
    kinds = {
        layer: replace(
            layer,
            formats=_formats(config, stored, dense_shapes(config, number) | expert_shapes(config, number, 0)),
        )
        for layer, number in numbers.items()
    }
    return replace(
        config,
        pattern=tuple(kinds[layer] for layer in config.pattern),
        formats=_formats(config, stored, global_shapes(config)),
    )


def quantization_config(config: ModelConfig) -> dict[str, object]:
    """The keys of config.json that say how weights are coded; none for plain ones."""
    formats = config.coded_formats
    assert len(formats) <= 1, "config.json describes one format"
    return {"quantization_config": {"quant_method": METHOD, "format": formats[0]}} if formats else {}


def _formats(config: ModelConfig, stored: StoredFormat, shapes: Mapping[str, Shape]) -> Formats:
    return tuple(
        (tensor_in_layer(name), stored.name)
        for name, shape in shapes.items()
        if stored.fits(shape) and role_of(name) != "small" and not is_transposed(config, name)
    )

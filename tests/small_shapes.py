"""Small cuts of the families that are only simulated: their kinds of layers, with few and small experts."""

from __future__ import annotations

from msgspec.structs import replace

from moesched.models.config import ModelConfig
from moesched.models.layers import Layer
from moesched.models.reading import runs
from moesched.models.shapes import SHAPES

EXPERTS = 8
FAMILIES = {
    each.form: each.name
    for each in reversed(SHAPES.values())
    if not runs(each) and each.name != "llama-4-scout"
}
"""One model of each family; that of Llama 4 with dense layers."""


def small(name: str, layers: int = 4) -> ModelConfig:
    """A model's kinds of layers in about their shares, with 8 experts of an eighth of their width."""
    cut = SHAPES[name].cut(layers)
    pattern = tuple(map(_with_few_experts, cut.pattern))
    return replace(cut, pattern=pattern, vocabulary=1024)


def _with_few_experts(layer: Layer) -> Layer:
    network = layer.feed_forward
    if not network.experts:
        return layer
    fewer = replace(
        network, experts=EXPERTS, top_k=min(2, network.top_k), intermediate=network.intermediate // 8
    )
    return replace(layer, feed_forward=fewer)

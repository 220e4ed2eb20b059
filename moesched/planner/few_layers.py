"""Cuts a model to a few of its layers, which show the behaviour of a schedule in a fraction of the time."""

from __future__ import annotations

from functools import lru_cache

from msgspec.structs import replace

from moesched.models.config import ModelConfig
from moesched.models.layout import WeightLayout, weight_layout
from moesched.planner.setting import Setting

DEPTHS = (4, 8, 16)
"""Numbers of layers to cut a model to, the fewest first."""


def few_layers(config: ModelConfig, layers: int) -> ModelConfig:
    """Return a model cut to about `layers` layers, with a vocabulary cut in proportion.

    The time of a step is then cut in proportion, too. Where layers differ, the model keeps all kinds of layers, and may
    have more layers than asked for.
    """
    shorter = config.cut(layers)
    return replace(shorter, vocabulary=max(1, round(config.vocabulary * shorter.layers / config.layers)))


def depths_of(setting: Setting) -> list[int]:
    """Return the numbers of layers to which trial runs may cut the model, the fewest first.

    The result is empty if several machines or accelerators share the model.
    """
    if setting.machine.accelerator_group.count > 1 or setting.nodes > 1:
        return []
    return [depth for depth in DEPTHS if 2 * depth <= setting.layout.config.layers]


def cut(setting: Setting, layers: int) -> Setting:
    """Return the setting with the model cut to `layers` layers."""
    layout = setting.layout
    return replace(setting, layout=_layout(layout.config, layout.dtype, layout.page_bytes, layers))


def probed(setting: Setting) -> Setting:
    """Return the setting with the model cut to the fewest layers of trial runs; unchanged if it may not be cut."""
    depths = depths_of(setting)
    return cut(setting, depths[0]) if depths else setting


@lru_cache(maxsize=16)
def _layout(config: ModelConfig, dtype: str, page_bytes: int, layers: int) -> WeightLayout:
    return weight_layout(few_layers(config, layers), dtype, page_bytes)

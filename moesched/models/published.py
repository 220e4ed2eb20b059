"""The form of published checkpoints: the names and shapes of their tensors, and their config.json."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable
from itertools import chain
from typing import Any, Literal, get_args

import msgspec

from moesched.models.architectures import ARCHITECTURES
from moesched.models.architectures.architecture import Stored
from moesched.models.coded_models import quantization_config
from moesched.models.config import ModelConfig
from moesched.models.tensor_shapes import Shape
from moesched.models.tensors import expert_shapes, tensor_shapes

STANDARD_DEVIATION = 0.02
"""Standard deviation of random weights."""

StackedBy = Literal["expert", "layer"]


class Published(msgspec.Struct, frozen=True, gc=False):
    """The shape of a tensor in a file, and (name, shape) of each tensor of the model that it contains, in order."""

    shape: Shape
    parts: tuple[tuple[str, Shape], ...]


def published_tensors(config: ModelConfig) -> dict[str, Published]:
    """Return the tensors of a model's published checkpoints, by their names in the files."""
    return with_shapes(config, ARCHITECTURES[config.form].tensors(config))


def other_tensors(config: ModelConfig) -> dict[str, Published]:
    """Return the tensors that replace published ones in checkpoints with stacked experts, by their names in files."""
    others = with_shapes(config, ARCHITECTURES[config.form].other_tensors(config))
    for by in get_args(StackedBy):
        others |= stacked_tensors(config, by)
    return others


def known_tensors(config: ModelConfig) -> dict[str, Published]:
    """Return all tensors that `open_checkpoint` accepts, by names in files: published ones, and stacked experts."""
    return other_tensors(config) | published_tensors(config)


def extra_names(config: ModelConfig) -> re.Pattern[str]:
    """Return a pattern that matches the names of tensors that files have but the model does not use.

    Names are matched without their prefix "model.".
    """
    architecture, shapes = ARCHITECTURES[config.form], tensor_shapes(config)
    patterns = [*architecture.extra_tensors(config)]
    if config.routed.experts == 1:  # a choice of one has no weights
        forms = chain(architecture.tensors(config), architecture.other_tensors(config))
        patterns += [each.name for each in forms if each.parts[0] not in shapes]
    return re.compile("|".join(fnmatch.translate(each.removeprefix("model.")) for each in patterns))


def stacked_tensors(config: ModelConfig, by: StackedBy) -> dict[str, Published]:
    """Return the tensors that replace the experts' tensors in prestacked checkpoints, by their names in files.

    If `by` is "expert", there is a tensor for each expert number, with that expert of every layer: (layers, matrices,
    elements of a matrix). If `by` is "layer", there is a tensor for each matrix of a layer, with that matrix of all
    experts: (experts, rows, columns), as MLX's `gather_mm` takes it.
    """
    if by == "expert":
        return {
            f"prestacked.experts.{expert}": _one_expert(config, expert)
            for expert in range(config.routed.experts)
        }
    layers = range(config.layers)
    return {name: each for layer in layers for name, each in _one_layer(config, layer).items()}


def _one_expert(config: ModelConfig, expert: int) -> Published:
    parts = [part for layer in range(config.layers) for part in expert_shapes(config, layer, expert).items()]
    items = config.hidden * config.routed.intermediate
    return Published((config.layers, len(parts) // config.layers, items), tuple(parts))


def _one_layer(config: ModelConfig, layer: int) -> dict[str, Published]:
    of_experts = [expert_shapes(config, layer, expert) for expert in range(config.routed.experts)]
    return {
        f"prestacked.layers.{layer}.{parts[0][0].rpartition('.')[2]}": Published(
            (config.routed.experts, *parts[0][1]), parts
        )
        for parts in zip(*(shapes.items() for shapes in of_experts), strict=True)
    }


def published_config(config: ModelConfig) -> dict[str, Any]:
    """Return the contents of config.json for a model."""
    common = {
        "bos_token_id": None,
        "eos_token_id": _one_or_list(config.stop_tokens),
        "initializer_range": STANDARD_DEVIATION,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": config.dtype,
        "use_cache": True,
        "vocab_size": config.vocabulary,
    }
    return common | quantization_config(config) | ARCHITECTURES[config.form].config_json(config)


def with_shapes(config: ModelConfig, tensors: Iterable[Stored]) -> dict[str, Published]:
    """Return the shapes of `tensors`, by name in files; tensors that the model does not have are left out."""
    shapes = tensor_shapes(config)
    return {
        name: _published([(part, shapes[part]) for part in parts], stacks)
        for name, parts, stacks in tensors
        if parts[0] in shapes  # a model with one expert has no router
    }


def _published(parts: list[tuple[str, Shape]], stacks: int) -> Published:
    if len(parts) == 1 and not stacks:  # most are so
        return Published(parts[0][1], tuple(parts))
    rows = sum(shape[0] for _, shape in parts)
    shape = (rows, *parts[0][1][1:])
    return Published((stacks, rows // stacks, *shape[1:]) if stacks else shape, tuple(parts))


def _one_or_list(tokens: tuple[int, ...]) -> int | list[int] | None:
    if not tokens:
        return None
    return tokens[0] if len(tokens) == 1 else list(tokens)

"""The form of checkpoints: what their files call the tensors and how they cut them, and their config.json."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from moesched.models.architectures import ARCHITECTURES
from moesched.models.architectures.architecture import Stored
from moesched.models.config import ModelConfig
from moesched.models.tensors import Shape, tensor_shapes

STANDARD_DEVIATION = 0.02
"""Of random weights."""


class Published(NamedTuple):
    """A stored tensor, and the canonical tensors that lie in it one after the other."""

    shape: Shape
    parts: tuple[tuple[str, Shape], ...]


def published_tensors(config: ModelConfig) -> dict[str, Published]:
    """What published checkpoints of such a model hold, by the names that they use."""
    return _with_shapes(config, ARCHITECTURES[config.form].tensors(config))


def known_tensors(config: ModelConfig) -> dict[str, Published]:
    """The same, with what checkpoints in other forms hold instead of some of it."""
    return _with_shapes(config, ARCHITECTURES[config.form].other_tensors(config)) | published_tensors(config)


def published_config(config: ModelConfig) -> dict[str, Any]:
    """What config.json says of such a model."""
    common = {
        "bos_token_id": None,
        "eos_token_id": _one_or_list(config.stop_tokens),
        "initializer_range": STANDARD_DEVIATION,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": config.dtype,
        "use_cache": True,
        "vocab_size": config.vocabulary,
    }
    return common | ARCHITECTURES[config.form].config_json(config)


def _with_shapes(config: ModelConfig, tensors: Iterable[Stored]) -> dict[str, Published]:
    shapes = tensor_shapes(config)
    return {
        name: _published([(part, shapes[part]) for part in parts], stacks)
        for name, parts, stacks in tensors
        if parts[0] in shapes  # a model with one expert has no use for a router
    }


def _published(parts: list[tuple[str, Shape]], stacks: int) -> Published:
    rows = sum(shape[0] for _, shape in parts)
    shape = (rows, *parts[0][1][1:])
    return Published((stacks, rows // stacks, *shape[1:]) if stacks else shape, tuple(parts))


def _one_or_list(tokens: tuple[int, ...]) -> int | list[int] | None:
    if not tokens:
        return None
    return tokens[0] if len(tokens) == 1 else list(tokens)

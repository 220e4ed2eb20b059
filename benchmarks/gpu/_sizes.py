"""Models, requests and budgets of the rows of gpu_hour.py, and small ones to try it on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from moesched.models.config import ITEM_BYTES, ModelConfig
from moesched.models.shapes import SHAPES
from moesched.models.tensors import count_weights


class Requests(NamedTuple):
    """Equal requests, in batches of successive micro-batches.

    Attributes:
        total: number of requests; more than a batch holds run one batch after the other.
        prompt: tokens of each prompt.
        new_tokens: tokens to generate for each.
    """

    total: int
    prompt: int
    new_tokens: int
    batch: int
    micro_batch: int


class Sizes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The sizes of all rows.

    Attributes:
        device: of `moesched run`.
        shape, changes: of the models, by name, and by how they differ from it.
        layers: of the model whose weights fit into the GPU; `large_layers`, of the other one.
        families: models of other families by name, with their layers.
        streamed: requests of runs whose weights stream.
        resident: requests of runs whose weights stay, in several batches, as the first one is the slower.
        familiar: requests of models of other families.
        single: one request that stays for long.
        prompt: tokens of the prompts of the rows beside other programs, and as many new ones as `new_tokens`.
        batches: their sizes.
        ordered: requests of policies that are put in order.
        gpu: the GPU's memory where weights stream; half: where half of the experts fit; large_gpu: of the large model.
        pinned: page-locked memory where staging is forced.
    """

    device: str
    shape: str
    changes: dict[str, Any] = {}
    layers: int
    large_layers: int
    families: dict[str, int]
    familiar: Requests
    streamed: Requests
    resident: Requests
    single: Requests
    many: Requests
    prompt: int
    new_tokens: int
    batches: tuple[int, ...]
    ordered: Requests
    gpu: int
    half: int
    large_gpu: int
    pinned: int

    @property
    def model(self) -> ModelConfig:
        """The model whose weights fit into the GPU."""
        return SHAPES[self.shape].varied(**self.changes, layers=self.layers, dtype="bfloat16")

    @property
    def large(self) -> ModelConfig:
        """The same with more layers."""
        return SHAPES[self.shape].varied(**self.changes, layers=self.large_layers, dtype="bfloat16")

    def family(self, name: str) -> ModelConfig:
        """A model of another family."""
        return SHAPES[name].varied(**self.changes, layers=self.families[name], dtype="bfloat16")

    @property
    def small(self) -> bool:
        """True if figures say nothing of speed."""
        return self.model.hidden < 1024


SIZES = msgspec.toml.decode(Path(__file__).with_name("sizes.toml").read_bytes(), type=dict[str, Sizes])
FULL, SMALL = SIZES["full"], SIZES["small"]


def weight_bytes(config: ModelConfig) -> int:
    """Bytes of all weights."""
    return count_weights(config) * ITEM_BYTES[config.dtype]


def active_bytes(config: ModelConfig, rows: int) -> int:
    """Bytes of weights that a decode step of many rows touches at least: the embedding is only looked up.

    One row touches the experts that its router chooses; many rows are taken to touch all of them.
    """
    experts = config.routed.experts
    chosen = min(experts, config.routed.top_k * rows)
    return weight_bytes(config) - _embedding_bytes(config) - _expert_bytes(config, experts - chosen)


def flops_of_a_token(config: ModelConfig) -> float:
    """Products of a prompt's token in its layers, without attention; the LM head is for the last token alone."""
    passed = active_bytes(config, 1) - _embedding_bytes(config)
    return 2 * passed / ITEM_BYTES[config.dtype]


def _embedding_bytes(config: ModelConfig) -> int:
    """Bytes of the embedding; the LM head has as many."""
    return config.vocabulary * config.hidden * ITEM_BYTES[config.dtype]


def _expert_bytes(config: ModelConfig, experts: int) -> int:
    """Bytes of as many experts in each layer."""
    return 3 * config.hidden * config.routed.intermediate * ITEM_BYTES[config.dtype] * experts * config.layers

"""Models, requests and budgets of the rows of gpu_hour.py, and small ones to try it on a CPU."""

from __future__ import annotations

from typing import NamedTuple

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


class Sizes(NamedTuple):
    """The sizes of all rows.

    Attributes:
        device: of `moesched run`.
        model: the model whose weights fit into the GPU.
        large: the same shape with more layers.
        streamed: requests of runs whose weights stream.
        resident: requests of runs whose weights stay, in several batches, as the first one is the slower.
        single: one request that stays for long.
        prompt: tokens of the prompts of the rows beside other programs, and as many new ones as `new_tokens`.
        batches: their sizes.
        ordered: requests of policies that are put in order.
        gpu: the GPU's memory where weights stream; half: where half of the experts fit; large_gpu: of the large model.
        pinned: page-locked memory where staging is forced.
    """

    device: str
    model: ModelConfig
    large: ModelConfig
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
    def small(self) -> bool:
        """True if figures say nothing of speed."""
        return self.model.hidden < 1024


def _with(shape: ModelConfig, layers: int) -> ModelConfig:
    return shape.varied(layers=layers, dtype="bfloat16")


MIXTRAL = SHAPES["mixtral-8x7b"]
FULL = Sizes(
    device="cuda",
    model=_with(MIXTRAL, 4),
    large=_with(MIXTRAL, 16),
    streamed=Requests(512, 77, 12, 512, 64),
    resident=Requests(512, 77, 12, 64, 64),
    single=Requests(1, 77, 400, 1, 1),
    many=Requests(2048, 77, 32, 2048, 64),
    prompt=512,
    new_tokens=33,
    batches=(1, 16, 64),
    ordered=Requests(64, 77, 6, 64, 16),
    gpu=8 * 10**9,
    half=7 * 10**9,
    large_gpu=24 * 10**9,
    pinned=2 * 10**9,
)
TINY = SHAPES["mixtral-0.8b"].varied(
    hidden=128, intermediate=128, heads=4, kv_heads=2, head_dim=32, vocabulary=256
)
SMALL = Sizes(
    device="benchmarks.gpu._small_gpu:SmallGpu",
    model=_with(TINY, 3),
    large=_with(TINY, 4),
    streamed=Requests(4, 5, 3, 4, 2),
    resident=Requests(4, 5, 3, 2, 2),
    single=Requests(1, 5, 4, 1, 1),
    many=Requests(4, 5, 3, 4, 2),
    prompt=8,
    new_tokens=3,
    batches=(1,),
    ordered=Requests(2, 5, 2, 2, 1),
    gpu=2_500_000,
    half=2_300_000,
    large_gpu=2_500_000,
    pinned=4_000_000,
)


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

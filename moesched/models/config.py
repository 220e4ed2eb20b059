"""The configuration of a model: what kernels and planner need to know of it."""

from __future__ import annotations

from typing import Literal

import msgspec

DType = Literal["float32", "bfloat16"]
NormKind = Literal["rms", "layer"]
HeadNorm = Literal["head", "projection"]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the kernels and the planner need to know of a model. Sizes are in elements.

    A dense model has one expert and no router. stop_tokens end a sequence. dtype is what the model computes
    in unless somebody asks for another one. norm: by the root mean square, or by mean and variance.
    clip_qkv: the largest magnitude that queries, keys and values keep. qk_norm: whether queries and keys are normalised
    by their root mean square, each head by itself or all heads together. weights_sum_to_one: of a token's chosen
    experts; otherwise they are their share of a softmax over all experts. form: the architecture, whose file says how
    checkpoints name and cut tensors (see `architectures`). transposed_down: whether those hold the experts' down
    matrices as (inputs, outputs). ranks: over how many it is cut (see `tensor_parallel.py`); heads, kv_heads and
    intermediate are then those of one rank, all else is the whole model's.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    vocabulary: int
    norm_eps: float
    rope_theta: float
    sliding_window: int | None
    max_positions: int
    tied_embeddings: bool
    stop_tokens: tuple[int, ...]
    dtype: DType
    norm: NormKind = "rms"
    clip_qkv: float | None = None
    qk_norm: HeadNorm | None = None
    weights_sum_to_one: bool = True
    form: str = "mixtral"
    transposed_down: bool = False
    ranks: int = 1

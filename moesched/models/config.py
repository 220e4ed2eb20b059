"""The configuration of a model, for kernels and the planner."""

from __future__ import annotations

from typing import Literal

import msgspec

DType = Literal["float32", "bfloat16"]
NormKind = Literal["rms", "layer"]
HeadNorm = Literal["head", "projection"]

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The shape of a model and the variants of its operations; flat, because config.json is.

    Sizes are in elements. A dense model has one expert and no router.

    Attributes:
        stop_tokens: tokens that end a sequence.
        dtype: the default dtype of computation.
        norm: "rms" divides by the root mean square, "layer" normalises by mean and variance.
        clip_qkv: the largest magnitude of queries, keys and values; None does not clip.
        qk_norm: RMS norm of queries and keys: of each head, or of the whole projection; None for none.
        weights_sum_to_one: whether the weights of a token's experts are a softmax over those experts; otherwise they
            are taken from a softmax over all experts.
        form: the architecture, by its key in `ARCHITECTURES`; it names the tensors of checkpoints.
        transposed_down: whether checkpoints store the experts' down matrices as (inputs, outputs).
        ranks: the tensor-parallel ranks (see `tensor_parallel.py`). heads, kv_heads and intermediate are those of one
            rank, all other sizes are of the whole model.
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

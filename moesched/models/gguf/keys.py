"""The class of the keys in a GGUF file's metadata that describe a model."""

from __future__ import annotations

import msgspec

SOFTMAX, SIGMOID = 1, 2
"""Values of `expert_gating_func`."""


class GgufKeys(msgspec.Struct, kw_only=True, rename=lambda name: name.replace("__", ".")):
    """The keys in a GGUF file's metadata that describe a model.

    In files, each key begins with the architecture's name and a dot; two underscores in a field's name stand for a dot.
    """

    vocab_size: int | None = None
    block_count: int
    context_length: int
    embedding_length: int
    attention__head_count: int
    feed_forward_length: int = 0
    attention__head_count_kv: int | None = None
    attention__key_length: int | None = None
    attention__value_length: int | None = None
    attention__layer_norm_rms_epsilon: float | None = None
    attention__layer_norm_epsilon: float | None = None
    attention__clamp_kqv: float | None = None
    attention__sliding_window: int | None = None
    attention__scale: float | None = None
    embedding_scale: float | None = None
    residual_scale: float | None = None
    logit_scale: float | None = None
    rope__dimension_count: int | None = None
    rope__freq_base: float = 10_000.0
    rope__freq_base_swa: float | None = None
    rope__scale_linear: float | None = None
    rope__scaling__type: str | None = None
    rope__scaling__finetuned: bool | None = None
    rope__scaling__factor: float | None = None
    rope__scaling__original_context_length: int | None = None
    rope__scaling__attn_factor: float | None = None
    rope__scaling__yarn_attn_factor: float | None = None
    rope__scaling__yarn_ext_factor: float | None = None
    rope__scaling__yarn_beta_fast: float | None = None
    rope__scaling__yarn_beta_slow: float | None = None
    expert_count: int = 0
    expert_used_count: int = 0
    expert_feed_forward_length: int | None = None
    expert_shared_count: int | None = None
    expert_gating_func: int | None = None
    expert_weights_norm: bool | None = None
    expert_weights_scale: float | None = None
    expert_group_count: int | None = None
    expert_group_used_count: int | None = None
    leading_dense_block_count: int | None = None
    nextn_predict_layers: int | None = None

    @property
    def head_dim(self) -> int:
        """Number of elements of a head's query or key."""
        return self.attention__key_length or self.embedding_length // max(self.attention__head_count, 1)

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads."""
        given = self.attention__head_count_kv
        return self.attention__head_count if given is None else given

    @property
    def rotation_factor(self) -> float | None:
        """The factor by which rotations are scaled: `rope.scaling.factor`, or the older `rope.scale_linear`."""
        given = self.rope__scaling__factor
        return self.rope__scale_linear if given is None else given

    @property
    def rotation_kind(self) -> str:
        """The type of scaling of rotations: the stored type, else "linear" if there is a factor other than 0 and 1."""
        if self.rope__scaling__type is not None:
            return self.rope__scaling__type
        return "none" if self.rotation_factor in (None, 0.0, 1.0) else "linear"

    @property
    def layers(self) -> int:
        """Number of layers, without the prediction layers that may follow them."""
        return self.block_count - (self.nextn_predict_layers or 0)

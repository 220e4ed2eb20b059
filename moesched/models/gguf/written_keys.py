"""Makes the metadata of a model that is written to a GGUF file."""

from __future__ import annotations

from itertools import cycle, islice, takewhile
from typing import Any

from msgspec.structs import replace

from moesched.errors import BadInput
from moesched.models.config import ModelConfig
from moesched.models.gguf.families import GGUF_FAMILIES, GgufFamily, architecture_of
from moesched.models.gguf.keys import SIGMOID, GgufKeys
from moesched.models.rotary import Linear, Yarn


def gguf_keys(config: ModelConfig) -> GgufKeys:
    """Return the metadata that describe a model.

    Raises:
        BadInput: layers differ in more than the formats of their weights, or no key describes the rotary embedding.
    """
    family, dense = GGUF_FAMILIES[architecture_of(config)], _dense_layers(config)
    _require_described(config, family, dense)
    attention, network, router = config.layer(0).grouped, config.routed, config.routed.router
    by_mean = config.norm == "layer"
    return GgufKeys(
        vocab_size=config.vocabulary,
        block_count=config.layers,
        context_length=config.max_positions,
        embedding_length=config.hidden,
        feed_forward_length=config.layer(0).feed_forward.shared if dense else network.intermediate,
        attention__head_count=attention.heads,
        attention__head_count_kv=attention.kv_heads,
        attention__key_length=attention.head_dim,
        attention__value_length=attention.head_dim,
        attention__layer_norm_rms_epsilon=None if by_mean else config.norm_eps,
        attention__layer_norm_epsilon=config.norm_eps if by_mean else None,
        attention__clamp_kqv=attention.clip,
        attention__sliding_window=attention.window,
        attention__scale=attention.scale,
        embedding_scale=_unless_one(config.embedding_factor),
        residual_scale=_unless_one(config.residual_factor),
        logit_scale=_unless_one(1 / config.logits_factor),
        rope__dimension_count=attention.rotary.turning(attention.head_dim),
        rope__freq_base=attention.rotary.theta,
        **_scaling(config, family),
        expert_count=network.experts if network.experts > 1 else 0,
        expert_used_count=network.top_k if network.experts > 1 else 0,
        expert_feed_forward_length=network.intermediate,
        expert_shared_count=network.shared // network.intermediate or None,
        expert_gating_func=SIGMOID if router.score == "sigmoid" else None,
        expert_weights_norm=router.normalised if network.shared else None,
        expert_weights_scale=router.scale if network.shared else None,
        expert_group_count=router.groups if router.groups > 1 else None,
        expert_group_used_count=router.kept_groups if router.groups > 1 else None,
        leading_dense_block_count=dense or None,
    )


def _require_described(config: ModelConfig, family: GgufFamily, dense: int) -> None:
    """Check that the metadata of a family can describe a model's layers.

    dense: number of first layers without experts.

    Raises:
        BadInput: layers differ that have to be alike, or the experts' activation is not the family's.
    """
    first, network = config.layer(0).grouped, config.routed
    turns = cycle((first.window, None) if family.windows_in_turn else (first.window,))
    attentions = [replace(first, window=window) for window in islice(turns, config.layers)]
    if [layer.attention for layer in config.pattern] != attentions or any(
        layer.feed_forward != network for layer in config.pattern[dense:]
    ):
        raise BadInput(
            f"{config.name} has layers that differ, which no GGUF file describes: use layers that are alike"
        )
    if network.activation != family.activation:
        raise BadInput(
            f"{config.name} has experts with {network.activation}, and GGUF files of the family have "
            f"{family.activation}: name a folder"
        )


def _dense_layers(config: ModelConfig) -> int:
    """Return the number of first layers without experts; 0 in families whose layers all have experts."""
    family, first = GGUF_FAMILIES[architecture_of(config)], config.layer(0)
    if not family.dense_first or first.feed_forward.experts:
        return 0
    return sum(1 for _ in takewhile(lambda layer: layer == first, config.pattern))


def _scaling(config: ModelConfig, family: GgufFamily) -> dict[str, Any]:
    scaling = config.attention.rotary.scaling
    if scaling is None:
        return {"rope__scaling__type": "none"}
    kind = scaling.__struct_config__.tag
    keys = {"rope__scaling__type": kind, "rope__scaling__factor": scaling.factor}
    if isinstance(scaling, Linear):
        return keys
    if isinstance(scaling, Yarn):
        if scaling.truncate == family.truncate:
            return keys | {
                "rope__scaling__original_context_length": scaling.original_max_position_embeddings,
                "rope__scaling__yarn_beta_fast": scaling.beta_fast,
                "rope__scaling__yarn_beta_slow": scaling.beta_slow,
            }
        kind = f"{kind}, truncate={scaling.truncate}"
    raise BadInput(
        f"{config.name}: GGUF files with a rotation scaled by {kind} are not written: name a folder"
    )


def _unless_one(factor: float) -> float | None:
    return None if factor == 1 else factor

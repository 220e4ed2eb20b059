"""Each key of transformers' configuration classes changes the model that is read, is refused, or is named here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moesched.errors import BadInput
from moesched.models.architectures import ARCHITECTURES
from moesched.models.config import ModelConfig
from moesched.models.reading import read_config
from moesched.models.tensors import count_weights

ABSENT = {"kimi_k2"}
"""Values of `model_type` whose class comes with the checkpoint."""


OF_TRAINING = """
attention_dropout attn_pdrop emb_pdrop moe_jitter_eps moe_loss_weight initializer_range output_router_logits resid_pdrop
router_aux_loss_coef router_jitter_noise
"""


OF_THE_LIBRARY = """
_name_or_path architectures chunk_size_feed_forward id2label is_encoder_decoder label2id output_attentions
output_hidden_states pretraining_tp problem_type return_dict transformers_version use_cache
"""


OF_OTHER_TOKENS = "bos_token_id pad_token_id"
"""Prompts have the first token where the tokenizer adds it, and none is padded."""


WITHOUT_EFFECT = {*OF_TRAINING.split(), *OF_THE_LIBRARY.split(), *OF_OTHER_TOKENS.split()}


OF_VALUES = """
attn_scale attn_temperature_tuning final_logit_softcapping floor_scale hidden_act hidden_activation n_group
norm_topk_prob rms_norm_eps rope_interleave rope_parameters routed_scaling_factor swiglu_alpha swiglu_limit topk_group
"""
"""Keys that change results, but neither weights nor time: without effect on models that are only simulated."""

DERIVED = {
    "dbrx": {"hidden_size", "num_key_value_heads"},
    # The method of groups needs no bias of the router.
    "deepseek_v2": {"head_dim", "num_key_value_heads", "qk_head_dim", "topk_method"},
    "deepseek_v3": {"head_dim", "num_key_value_heads", "qk_head_dim"},
    # The norm has no weights, and `layer_types` says which layers attend to all tokens.
    "llama4_text": {"use_qk_norm", "no_rope_layers"},
    # Layers without experts are refused.
    "qwen3_moe": {"intermediate_size"},
    "qwen3_next": {"intermediate_size"},
    # They belong to shared caches and to embeddings of each layer, both refused.
    "gemma4_text": {"use_double_wide_mlp", "vocab_size_per_layer_input"},
}
"""Keys that a family computes from others, or has no use for."""

SHOWING: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 128},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 64},
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 6},
    "llama4_text": {"interleave_moe_layer_step": 2},
    "gemma4_text": {"enable_moe_block": True, "hidden_size_per_layer_input": 0, "num_experts": 8}
    | {"top_k_experts": 2, "moe_intermediate_size": 64},
}
"""Settings with which other keys show."""
FAMILIES = sorted(
    name
    for each in ARCHITECTURES.values()
    for name in each.model_types
    if name not in ABSENT and "text_config" not in CONFIG_MAPPING[name].sub_configs
)
RUNS = {name for each in ARCHITECTURES.values() if each.runs for name in each.model_types}


def published(model_type: str) -> dict[str, Any]:
    """The config.json that transformers writes."""
    config = CONFIG_MAPPING[model_type](**SHOWING.get(model_type, {}))
    values: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return values


def read(folder: Path, values: Mapping[str, Any]) -> ModelConfig | None:
    """The model, or None if it is refused."""
    (folder / "config.json").write_text(json.dumps(values))
    try:
        return read_config(folder)
    except BadInput:
        return None


def other_values(value: Any) -> list[Any]:
    """Values of the same type, or of any where there is none."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value * 2, value + 1, 0]
        case float():
            return [value * 2 + 1, value / 2]
        case str():
            return ["another"]
        case list():
            return [value[::-1], [*value[:-1], 1]]
        case dict() if "rope_theta" in value:
            return [value | {"rope_theta": 7.0}, value | {"rope_type": "yarn"}]
        case {"name": _}:
            return [{"name": "another"}]
        case dict():
            return [value | {"0": {"head_dim": 2}}]
    return [1, 0.5, True, "another", ["another"], {"0": {"head_dim": 2}}]


def keys_of(values: dict[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The name of each key, those of DBRX's inner objects too, and the whole with other values of it."""
    for key, value in values.items():
        if key in ("attn_config", "ffn_config"):
            for inner, changed in keys_of(value):
                if inner not in ("model_type", "dtype"):  # DBRX's objects repeat keys of all configurations
                    yield inner, [values | {key: each} for each in changed]
        else:
            yield key, [values | {key: each} for each in other_values(value)]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_key_changes_the_model_or_is_refused_or_is_known_to_have_no_effect(
    model_type: str, tmp_path: Path
) -> None:
    values = published(model_type)
    model = read(tmp_path, values)
    assert model is not None
    bare = {"model_type": model_type} | SHOWING.get(model_type, {})
    assert read(tmp_path, bare) == model, "a key that is missing has the default of transformers"
    unread = {
        key for key, changed in keys_of(values) if all(read(tmp_path, each) == model for each in changed)
    }
    neutral = (
        WITHOUT_EFFECT | DERIVED.get(model_type, set()) | set([] if model_type in RUNS else OF_VALUES.split())
    )
    assert unread <= neutral, "read these keys, refuse their other values, or name them here"


@pytest.mark.parametrize(
    ("model_type", "alias", "key"),
    [(name, *pair) for name in FAMILIES for pair in CONFIG_MAPPING[name].attribute_map.items()],
)
def test_another_name_that_transformers_takes_for_a_key_says_the_same(
    model_type: str, alias: str, key: str, tmp_path: Path
) -> None:
    values = published(model_type)
    changed = 2 * values[key]
    expected = read(tmp_path, values | {key: changed})
    assert expected is not None
    assert read(tmp_path, values | {alias: changed}) == expected
    del values[key]
    assert read(tmp_path, values | {alias: changed}) == expected


SMALL = {
    "hidden_size": 64, "num_hidden_layers": 6, "vocab_size": 100, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OTHERWISE_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = OTHERWISE_ROUTED | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
LINEAR = ROUTED | {
    "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
GEMMA = {"hidden_size_per_layer_input": 0, "global_head_dim": 32}


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gpt_oss", {"num_local_experts": 4}),
        ("gpt_oss", {"num_local_experts": 4, "attention_bias": False}),
        ("glm4_moe", OTHERWISE_ROUTED | {"first_k_dense_replace": 2}),
        ("glm4_moe", OTHERWISE_ROUTED | {"attention_bias": True, "use_qk_norm": True, "n_shared_experts": 2}),
        ("deepseek_v2", LATENT | {"q_lora_rank": None, "first_k_dense_replace": 1}),
        (
            "deepseek_v3",
            LATENT
            | {"q_lora_rank": 8, "n_group": 2, "topk_group": 1}
            | {"layer_types": ["full_attention"] * 6},
        ),
        ("qwen3_next", LINEAR | {"num_hidden_layers": 8, "attention_bias": True}),
        ("qwen3_5_moe_text", LINEAR | {"layer_types": ["linear_attention", "full_attention"] * 3}),
        ("gemma4_text", GEMMA),
        ("gemma4_text", GEMMA | {"global_head_dim": 16}),
        (
            "gemma4_text",
            GEMMA
            | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
            | {"num_global_key_value_heads": 1, "attention_k_eq_v": True, "attention_bias": True},
        ),
        ("llama4_text", {"num_local_experts": 4, "interleave_moe_layer_step": 2}),
        ("llama4_text", {"num_local_experts": 4, "moe_layers": [0, 5], "attention_bias": True}),
        ("minimax_m2", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("mixtral", {"num_local_experts": 4, "tie_word_embeddings": True}),
        ("mistral", {}),
        ("llama", {}),
        ("qwen3_moe", ROUTED),
        ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_a_model_has_as_many_weights_as_that_of_transformers(
    model_type: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    config = CONFIG_MAPPING[model_type](**(SMALL | settings))
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    biases = {name: each for name, each in model.named_buffers() if name.endswith("bias")}
    theirs = [*model.parameters(), *biases.values()]
    assert count_weights(read_config(tmp_path)) == sum(each.numel() for each in theirs)

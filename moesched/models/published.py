"""The form of published checkpoints: what their files call the tensors and how they cut them, and their config.json."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from moesched.models.config import ModelConfig
from moesched.models.tensors import Shape, tensor_shapes

STANDARD_DEVIATION = 0.02
"""Of random weights."""


class Published(NamedTuple):
    """A stored tensor, and the canonical tensors that lie in it one after the other."""

    shape: Shape
    parts: tuple[tuple[str, Shape], ...]


def published_tensors(config: ModelConfig) -> dict[str, Published]:
    """What the files of such a model hold, by the names that they use."""
    shapes = tensor_shapes(config)
    stored = _dbrx_parts(config) if config.form == "dbrx" else _llama_parts(config)
    return {name: _published([(part, shapes[part]) for part in parts]) for name, parts in stored}


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
    return common | (_dbrx_config(config) if config.form == "dbrx" else _llama_config(config))


def _published(parts: list[tuple[str, Shape]]) -> Published:
    rows = sum(shape[0] for _, shape in parts)
    return Published((rows, *parts[0][1][1:]), tuple(parts))


def _one_or_list(tokens: tuple[int, ...]) -> int | list[int] | None:
    if not tokens:
        return None
    return tokens[0] if len(tokens) == 1 else list(tokens)


# ---------------------------------------------------------------- Llama, Mistral, Mixtral

_GLOBAL_NAMES = {"embedding": "model.embed_tokens", "final_norm": "model.norm", "lm_head": "lm_head"}
_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "router": "block_sparse_moe.gate",
}
_EXPERT_NAMES = {"gate": "w1", "down": "w2", "up": "w3"}


def _llama_parts(config: ModelConfig) -> Iterator[tuple[str, list[str]]]:
    for name in tensor_shapes(config):
        yield _llama_name(name, dense=config.experts == 1), [name]


def _llama_name(name: str, dense: bool) -> str:
    if name in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[name] + ".weight"
    _, layer, *rest = name.split(".")
    return f"model.layers.{layer}.{_name_in_layer(rest, dense)}.weight"


def _name_in_layer(rest: list[str], dense: bool) -> str:
    if len(rest) == 1:
        return _LAYER_NAMES[rest[0]]
    _, expert, matrix = rest
    if dense:
        return f"mlp.{matrix}_proj"
    return f"block_sparse_moe.experts.{expert}.{_EXPERT_NAMES[matrix]}"


def _llama_config(config: ModelConfig) -> dict[str, Any]:
    """Mixtral, or Mistral for a dense model."""
    common = {
        "attention_dropout": 0.0,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden,
        "intermediate_size": config.intermediate,
        "max_position_embeddings": config.max_positions,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "sliding_window": config.sliding_window,
    }
    if config.experts == 1:
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **common}
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **common,
        "num_experts_per_tok": config.top_k,
        "num_local_experts": config.experts,
        "output_router_logits": False,
    }


# ---------------------------------------------------------------- DBRX


def _dbrx_parts(config: ModelConfig) -> Iterator[tuple[str, list[str]]]:
    """Queries, keys and values in one tensor; a layer's experts one after the other, w2 as (inputs, outputs)."""
    yield "transformer.wte.weight", ["embedding"]
    for layer in range(config.layers):
        block, ours = f"transformer.blocks.{layer}.", f"layers.{layer}."
        attention = block + "norm_attn_norm."
        yield attention + "norm_1.weight", [ours + "attention_norm"]
        yield attention + "attn.Wqkv.weight", [ours + part for part in "qkv"]
        yield attention + "attn.out_proj.weight", [ours + "o"]
        yield attention + "norm_2.weight", [ours + "ffn_norm"]
        yield block + "ffn.router.layer.weight", [ours + "router"]
        for name, part in (("w1", "gate"), ("v1", "up"), ("w2", "down")):
            experts = [f"{ours}experts.{expert}.{part}" for expert in range(config.experts)]
            yield f"{block}ffn.experts.mlp.{name}", experts
    yield "transformer.norm_f.weight", ["final_norm"]
    if not config.tied_embeddings:
        yield "lm_head.weight", ["lm_head"]


def _dbrx_config(config: ModelConfig) -> dict[str, Any]:
    # Published files have rope_theta in attn_config alone, where transformers 5 no longer looks for it.
    return {
        "architectures": ["DbrxForCausalLM"],
        "model_type": "dbrx",
        "attn_config": {
            "clip_qkv": config.clip_qkv,
            "kv_n_heads": config.kv_heads,
            "model_type": "",
            "rope_theta": config.rope_theta,
        },
        "d_model": config.hidden,
        "emb_pdrop": 0.0,
        "ffn_config": {
            "ffn_act_fn": {"name": "silu"},
            "ffn_hidden_size": config.intermediate,
            "model_type": "",
            "moe_jitter_eps": None,
            "moe_normalize_expert_weights": 1.0,
            "moe_num_experts": config.experts,
            "moe_top_k": config.top_k,
        },
        "max_seq_len": config.max_positions,
        "n_heads": config.heads,
        "n_layers": config.layers,
        "output_router_logits": False,
        "resid_pdrop": 0.0,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
    }

"""OLMoE: norms of queries and keys over all heads together, and weights of a token's experts that do not sum to 1."""

from __future__ import annotations

from functools import partial
from typing import Any

from moesched.models.architectures import llama_like
from moesched.models.architectures.architecture import Architecture, known_model
from moesched.models.architectures.llama_like import MLP_EXPERTS, LlamaLikeKeys
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile
from moesched.models.networks import FeedForward, Router


class OlmoeKeys(LlamaLikeKeys, kw_only=True):
    """The keys of an OLMoE's config.json that are read, with their defaults."""

    aliases = (("num_local_experts", "num_experts"),)

    vocab_size: int = 50304
    hidden_size: int = 2048
    intermediate_size: int = 2048
    num_hidden_layers: int = 16
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096
    eos_token_id: int | list[int] | None = 50279
    clip_qkv: float | None = None
    num_experts: int = 64
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False


def read(file: ConfigFile) -> ModelConfig:
    """Convert config.json to a ModelConfig."""
    keys = file.keys(OlmoeKeys)
    network = FeedForward(
        experts=keys.num_experts,
        top_k=keys.num_experts_per_tok,
        intermediate=keys.intermediate_size,
        router=Router(normalised=keys.norm_topk_prob),
    )
    layer = llama_like.layer(file, keys, network, clip=keys.clip_qkv, qk_norm="projection")
    return llama_like.build(file, keys, "olmoe", layer)


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the keys and values of config.json for a model, without the keys that all architectures share."""
    return llama_like.config_json(config) | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "clip_qkv": config.attention.clip,
        "intermediate_size": config.routed.intermediate,
        "norm_topk_prob": config.routed.router.normalised,
        "num_experts": config.routed.experts,
        "num_experts_per_tok": config.routed.top_k,
        "output_router_logits": False,
    }


OLMOE = Architecture(
    model_types=("olmoe",),
    shapes=(known_model(read, "olmoe-1b-7b", intermediate_size=1024),),
    sources={"olmoe-1b-7b": "huggingface.co/allenai/OLMoE-1B-7B-0924"},
    read=read,
    config_json=config_json,
    tensors=partial(llama_like.tensors, names=MLP_EXPERTS),
    other_tensors=llama_like.fused_tensors,
    extra_tensors=llama_like.extra_tensors,
)

"""GLM-4.5, GLM-4.5-Air and GLM-4.7: first layers without experts, a shared expert, biased projections.

Published files also have a multi-token prediction layer, which is not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from moesched.models.architectures import llama_like
from moesched.models.architectures.architecture import Architecture, Stored
from moesched.models.architectures.llama_like import MLP_EXPERTS, LlamaLikeKeys
from moesched.models.architectures.simulated import prediction_layer
from moesched.models.config import ModelConfig
from moesched.models.config_file import ConfigFile
from moesched.models.layers import GroupedAttention, Layer
from moesched.models.networks import FeedForward, Router
from moesched.models.rotary import Rotary

STOP = 151336
"""The token that ends the text of the published models."""


class Glm4MoeKeys(LlamaLikeKeys, kw_only=True):
    """The keys of a GLM-4.5's config.json that are read, with their defaults."""

    aliases = (("num_local_experts", "n_routed_experts"), ("num_mtp_layers", "num_nextn_predict_layers"))

    vocab_size: int = 151552
    hidden_size: int = 4096
    num_hidden_layers: int = 46
    eos_token_id: int | list[int] | None = None
    intermediate_size: int = 10944
    moe_intermediate_size: int = 1408
    num_attention_heads: int = 96
    rms_norm_eps: float = 1e-5
    partial_rotary_factor: float | None = 0.5
    use_qk_norm: bool = False
    n_routed_experts: int = 128
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    first_k_dense_replace: int = 1
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    num_nextn_predict_layers: int = 1


def read(file: ConfigFile) -> ModelConfig:
    """Convert config.json to a ModelConfig."""
    keys = file.keys(Glm4MoeKeys)
    file.require_layers(keys.num_hidden_layers)
    if keys.first_k_dense_replace >= keys.num_hidden_layers:
        what = f"first_k_dense_replace is {keys.first_k_dense_replace:,}"
        raise file.impossible(what, f"num_hidden_layers is {keys.num_hidden_layers:,}")
    for key in ("first_k_dense_replace", "num_nextn_predict_layers"):
        file.require_size(key, getattr(keys, key), least=0)
    for key in ("n_shared_experts", "moe_intermediate_size", "intermediate_size"):
        file.require_size(key, getattr(keys, key))
    routed = FeedForward(
        experts=keys.n_routed_experts,
        top_k=keys.num_experts_per_tok,
        intermediate=keys.moe_intermediate_size,
        shared=keys.n_shared_experts * keys.moe_intermediate_size,
        router=_router(
            normalised=keys.norm_topk_prob,
            scale=keys.routed_scaling_factor,
            groups=keys.n_group,
            kept_groups=keys.topk_group,
        ),
    )
    kinds = [
        llama_like.layer(
            file,
            keys,
            network,
            partial=True,
            qk_norm="head" if keys.use_qk_norm else None,
            biases="qkv" if keys.attention_bias else "",
        )
        for network in (FeedForward(shared=keys.intermediate_size), routed)
    ]
    pattern = _pattern(kinds, keys.first_k_dense_replace, keys.num_hidden_layers)
    config = llama_like.build(file, replace(keys, attention_bias=False), "glm4_moe", *pattern)
    return _with_prediction(config, keys.num_nextn_predict_layers)


def config_json(config: ModelConfig) -> dict[str, Any]:
    """Return the keys and values of config.json for a model, without the keys that all architectures share."""
    attention, routed, first = config.attention, config.routed, config.layer(0).feed_forward
    return llama_like.config_json(config) | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": bool(attention.biases),
        "first_k_dense_replace": sum(not layer.feed_forward.experts for layer in config.pattern),
        "head_dim": attention.head_dim,
        "intermediate_size": first.shared if not first.experts else routed.intermediate,
        "moe_intermediate_size": routed.intermediate,
        "n_group": routed.router.groups,
        "n_routed_experts": routed.experts,
        "n_shared_experts": routed.shared // routed.intermediate,
        "norm_topk_prob": routed.router.normalised,
        "num_experts_per_tok": routed.top_k,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": attention.rotary.turning(attention.head_dim) / attention.head_dim,
        "routed_scaling_factor": routed.router.scale,
        "topk_group": routed.router.kept_groups,
        "use_qk_norm": attention.qk_norm is not None,
    }


def tensors(config: ModelConfig) -> Iterator[Stored]:
    """Yield the tensors of published checkpoints, but not of multi-token prediction layers."""
    yield from llama_like.tensors(config, MLP_EXPERTS)
    yield from _beside_experts(config)


def extra_tensors(config: ModelConfig) -> Iterator[str]:
    """Yield name patterns of tensors that are not needed: multi-token prediction layers, and rotary frequencies."""
    yield from llama_like.extra_tensors(config)
    yield f"model.layers.{config.layers}.*"


def _beside_experts(config: ModelConfig) -> Iterator[Stored]:
    for number, layer in enumerate(config.pattern):
        block, ours = f"model.layers.{number}.mlp.", f"layers.{number}."
        shared = block
        if layer.feed_forward.experts:
            shared += "shared_experts."
            yield Stored(block + "gate.e_score_correction_bias", [ours + "router_bias"])
        for part in ("gate", "up", "down"):
            yield Stored(f"{shared}{part}_proj.weight", [f"{ours}shared_{part}"])


def _router(**settings: Any) -> Router:
    return Router(score="sigmoid", corrected=True, **settings)


def _pattern(kinds: Sequence[Layer], dense: int, layers: int) -> list[Layer]:
    return [kinds[0]] * dense + [kinds[1]] * (layers - dense)


def _with_prediction(config: ModelConfig, layers: int) -> ModelConfig:
    return replace(config, unused_weights=layers * prediction_layer(config, copies=2))


def _model(
    name: str, network: FeedForward, *, dense: tuple[int, int], layers: int, **settings: Any
) -> ModelConfig:
    """Return the configuration of a published model.

    network: the feed-forward network of layers with experts.
    dense: (number of first layers without experts, their inner width).
    layers: number of layers.
    settings: further fields of ModelConfig, and `qk_norm` of the attention.
    """
    attention = GroupedAttention(
        heads=96,
        kv_heads=8,
        head_dim=128,
        rotary=Rotary(theta=1e6, width=64),
        qk_norm=settings.pop("qk_norm", None),
        biases="qkv",
    )
    kinds = [
        Layer(attention=attention, feed_forward=each) for each in (FeedForward(shared=dense[1]), network)
    ]
    common: dict[str, Any] = {
        "vocabulary": 151552,
        "norm_eps": 1e-5,
        "max_positions": 131072,
        "tied_embeddings": False,
        "stop_tokens": (STOP,),
        "dtype": "bfloat16",
        "form": "glm4_moe",
    }
    pattern = tuple(_pattern(kinds, dense[0], layers))
    return _with_prediction(ModelConfig(name=name, pattern=pattern, **(common | settings)), 1)


_LARGE = FeedForward(experts=160, top_k=8, intermediate=1536, shared=1536, router=_router(scale=2.5))
_AIR = FeedForward(experts=128, top_k=8, intermediate=1408, shared=1408, router=_router())
_SIZES: dict[str, Any] = {"dense": (3, 12288), "layers": 92, "hidden": 5120, "qk_norm": "head"}
SHAPES = (
    _model("glm-4.5", _LARGE, **_SIZES),
    _model("glm-4.5-air", _AIR, dense=(1, 10944), layers=46, hidden=4096),
    _model("glm-4.7", _LARGE, max_positions=202752, **_SIZES),
)

GLM4_MOE = Architecture(
    model_types=("glm4_moe",),
    shapes=SHAPES,
    sources={
        "glm-4.5": "huggingface.co/zai-org/GLM-4.5",
        "glm-4.5-air": "huggingface.co/zai-org/GLM-4.5-Air",
        "glm-4.7": "huggingface.co/zai-org/GLM-4.7",
    },
    read=read,
    left_out=("embedding", "lm_head"),
    config_json=config_json,
    tensors=tensors,
    other_tensors=llama_like.fused_tensors,
    extra_tensors=extra_tensors,
)

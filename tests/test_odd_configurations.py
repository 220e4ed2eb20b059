"""Odd facts of checkpoints' files: the tokens of every device are Hugging Face's."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from against_hugging_face import assert_same_tokens, generated
from benchmarks.shared.random_models import COMMON, dbrx, mixtral, olmoe, qwen, ready

DEVICES = {
    "torch": "moesched.devices.torch.device:TorchDevice",
    "mlx": "moesched.devices.mlx.device:MlxDevice",
}


def config_says(**changes: Any) -> Callable[[Path], None]:
    """Change keys of config.json."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def router_of_one_expert(folder: Path) -> None:
    """Nothing to change: transformers writes a router for a single expert."""
    assert "model.layers.0.block_sparse_moe.gate.weight" in load_file(folder / "model.safetensors")


def copied_head(folder: Path) -> None:
    """Tied embeddings, and a copy of the embedding as a head."""
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def dense(model: Any, config: Any, **changes: Any) -> Any:
    """A small model without experts."""
    settings = {each: COMMON[each] for each in COMMON if each != "num_experts_per_tok"}
    return model(config(**settings, intermediate_size=56, **changes))


class Odd(NamedTuple):
    """A model, and a change of its files."""

    make: Callable[[], Any]
    change: Callable[[Path], None] = lambda folder: None


ODD = {
    "one expert and a router": Odd(
        partial(mixtral, num_local_experts=1, num_experts_per_tok=1), router_of_one_expert
    ),
    "all experts": Odd(partial(mixtral, num_local_experts=3, num_experts_per_tok=3)),
    "one expert of three": Odd(partial(mixtral, num_local_experts=3, num_experts_per_tok=1)),
    "four experts of 16": Odd(partial(mixtral, num_local_experts=16, num_experts_per_tok=4)),
    "three experts of five": Odd(partial(mixtral, num_local_experts=5, num_experts_per_tok=3)),
    "three heads of ten": Odd(partial(mixtral, num_attention_heads=3, num_key_value_heads=3, head_dim=10)),
    "one key-value head": Odd(partial(mixtral, num_attention_heads=6, num_key_value_heads=1, head_dim=8)),
    "a window longer than the prompts": Odd(partial(mixtral, sliding_window=100)),
    "a window of one token": Odd(partial(mixtral, sliding_window=1)),
    "heads narrower than the hidden state": Odd(partial(mixtral, hidden_size=44, head_dim=6)),
    "heads wider than the hidden state": Odd(partial(mixtral, head_dim=24)),
    "other epsilon": Odd(partial(mixtral, rms_norm_eps=0.1)),
    "fast rotation": Odd(partial(mixtral, rope_parameters={"rope_type": "default", "rope_theta": 2.0})),
    "tied embeddings": Odd(partial(mixtral, tie_word_embeddings=True)),
    "tied embeddings and a copy": Odd(partial(mixtral, tie_word_embeddings=True), copied_head),
    "tied embeddings and another head": Odd(mixtral, config_says(tie_word_embeddings=True)),
    "no dtype": Odd(mixtral, config_says(dtype=None, torch_dtype=None)),
    "llama": Odd(partial(dense, LlamaForCausalLM, LlamaConfig)),
    "mistral": Odd(partial(dense, MistralForCausalLM, MistralConfig, sliding_window=None)),
    "mistral, window": Odd(partial(dense, MistralForCausalLM, MistralConfig, sliding_window=5)),
    "ministral, a window in every second layer": Odd(
        partial(
            dense,
            MinistralForCausalLM,
            MinistralConfig,
            head_dim=8,
            sliding_window=3,
            layer_types=["full_attention", "sliding_attention"],
        )
    ),
    "olmoe": Odd(olmoe),
    "olmoe, 8 of 64": Odd(partial(olmoe, num_experts=64, num_experts_per_tok=8)),
    "olmoe, tied embeddings": Odd(partial(olmoe, tie_word_embeddings=True)),
    "olmoe, clip": Odd(partial(olmoe, clip_qkv=0.3)),
    "olmoe, clip and weights that sum to one": Odd(partial(olmoe, clip_qkv=0.3, norm_topk_prob=True)),
    "olmoe, shared heads": Odd(partial(olmoe, num_key_value_heads=1)),
    "qwen": Odd(qwen),
    "qwen, 8 of 128": Odd(partial(qwen, num_experts=128, num_experts_per_tok=8)),
    "qwen, tied embeddings": Odd(partial(qwen, tie_word_embeddings=True)),
    "qwen, window": Odd(partial(qwen, use_sliding_window=True, sliding_window=3)),
    "qwen, window that is off": Odd(partial(qwen, use_sliding_window=False), config_says(sliding_window=3)),
    "qwen, weights that do not sum to one": Odd(partial(qwen, norm_topk_prob=False)),
    "qwen, one expert": Odd(partial(qwen, num_experts=1, num_experts_per_tok=1, norm_topk_prob=False)),
    "dbrx, clip": Odd(partial(dbrx, attention={"clip_qkv": 0.2})),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("odd", ODD)
def test_an_odd_model_gives_the_tokens_of_hugging_face(odd: str, device: str, tmp_path: Path) -> None:
    module, _, name = DEVICES[device].partition(":")
    if device == "mlx":
        pytest.importorskip("mlx.core", reason="there is no MLX for this platform")
    torch.manual_seed(1)
    ODD[odd].make().save_pretrained(tmp_path)
    ODD[odd].change(tmp_path)
    model = ready(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert_same_tokens(model, generated(tmp_path, kind=getattr(importlib.import_module(module), name)))

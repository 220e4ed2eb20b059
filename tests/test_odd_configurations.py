"""Odd facts of checkpoints' files: the tokens of every device are Hugging Face's."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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
from benchmarks.shared.random_models import (
    COMMON,
    dbrx,
    glm,
    gpt_oss,
    granite,
    granite_shared,
    minimax,
    mixtral,
    olmoe,
    qwen,
    ready,
)
from tables import table

DEVICES = {
    "torch": "moesched.devices.torch.device:TorchDevice",
    "mlx": "moesched.devices.mlx.device:MlxDevice",
}


def copied_head(folder: Path) -> None:
    """Tied embeddings, and a copy of the embedding as a head."""
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def dense(model: Any, config: Any, **changes: Any) -> Any:
    """A small model without experts."""
    settings = {each: COMMON[each] for each in COMMON if each != "num_experts_per_tok"}
    return model(config(**settings, intermediate_size=56, **changes))


MODELS: dict[str, Callable[..., Any]] = {
    "mixtral": mixtral,
    "dbrx": dbrx,
    "olmoe": olmoe,
    "qwen": qwen,
    "minimax": minimax,
    "glm": glm,
    "gpt-oss": gpt_oss,
    "granite": granite,
    "granite-shared": granite_shared,
    "llama": partial(dense, LlamaForCausalLM, LlamaConfig),
    "mistral": partial(dense, MistralForCausalLM, MistralConfig),
    "ministral": partial(dense, MinistralForCausalLM, MinistralConfig),
}
ODD = {odd: rest for odd, *rest in table("published.md", "Odd configurations")}


@pytest.mark.parametrize(
    ("odd", "device"),
    [
        (odd, device)
        for odd in ODD
        for device in DEVICES
        if device != "mlx" or ODD[odd][0] not in ("glm", "gpt-oss", "granite", "granite-shared")
    ],
)
def test_an_odd_model_gives_the_tokens_of_hugging_face(odd: str, device: str, tmp_path: Path) -> None:
    module, _, kind = DEVICES[device].partition(":")
    if device == "mlx":
        pytest.importorskip("mlx.core", reason="there is no MLX for this platform")
    torch.manual_seed(1)
    name, settings, change = ODD[odd]
    MODELS[name](**settings).save_pretrained(tmp_path)
    if change == "copied head":
        copied_head(tmp_path)
    elif change == "router of one expert":
        assert "model.layers.0.block_sparse_moe.gate.weight" in load_file(tmp_path / "model.safetensors")
    else:
        config = tmp_path / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    model = ready(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert_same_tokens(model, generated(tmp_path, kind=getattr(importlib.import_module(module), kind)))

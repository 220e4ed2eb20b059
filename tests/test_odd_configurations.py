"""Odd facts of checkpoints' files: the tokens of every device are Hugging Face's."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from functools import lru_cache, partial
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


class OddModel(NamedTuple):
    """A model's folder, and the model as Hugging Face reads it."""

    folder: Path
    model: Any


def odd_model(odd: str, folder: Path) -> OddModel:
    """Write a model into a folder, and read it."""
    torch.manual_seed(1)
    name, settings, change = ODD[odd]
    MODELS[name](**settings).save_pretrained(folder)
    if change == "copied head":
        copied_head(folder)
    elif change == "router of one expert":
        assert "model.layers.0.block_sparse_moe.gate.weight" in load_file(folder / "model.safetensors")
    else:
        config = folder / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    return OddModel(folder, ready(AutoModelForCausalLM.from_pretrained(folder)))


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], OddModel]:
    """The model with an odd fact; the last one is kept, as its devices follow each other."""
    return lru_cache(1)(lambda odd: odd_model(odd, tmp_path_factory.mktemp("odd")))


@pytest.mark.parametrize(
    ("odd", "device"),
    [
        (odd, device)
        for odd in ODD
        for device in DEVICES
        if device != "mlx" or ODD[odd][0] not in ("glm", "gpt-oss", "granite", "granite-shared")
    ],
)
def test_an_odd_model_gives_the_tokens_of_hugging_face(
    model_of: Callable[[str], OddModel], odd: str, device: str
) -> None:
    module, _, kind = DEVICES[device].partition(":")
    if device == "mlx":
        pytest.importorskip("mlx.core", reason="there is no MLX for this platform")
    folder, model = model_of(odd)
    assert_same_tokens(model, generated(folder, kind=getattr(importlib.import_module(module), kind)))

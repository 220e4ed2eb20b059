"""A small gpt-oss as it is published: experts in MXFP4, whose codes and scales are two tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

from moesched.models.random_model import write_random_model
from odd_models import GPT_OSS

SINGLE = "model.safetensors"


def published_gpt_oss(folder: Path) -> Path:
    """Write a model with random weights; returns its file."""
    config = replace(
        GPT_OSS, hidden=64, pattern=tuple(each.varied(intermediate=32) for each in GPT_OSS.pattern)
    )
    write_random_model(config, folder / "plain", dtype="float32")
    for name in ("config.json", SINGLE):
        (folder / name).unlink(missing_ok=True)
    tensors: dict[str, Any] = {}
    for shard in (folder / "plain").glob("*.safetensors"):
        tensors |= load_file(shard)
    save_file(tensors, folder / SINGLE)
    (folder / "config.json").write_bytes((folder / "plain" / "config.json").read_bytes())
    with_experts_in_mxfp4(folder)
    return folder / SINGLE


def with_experts_in_mxfp4(folder: Path) -> None:
    """Replace the experts' matrices of a model in one file by random codes and scales."""
    tensors, chance = load_file(folder / SINGLE), np.random.default_rng(1)
    for name in [*tensors]:
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensors.pop(name).shape
            groups = (experts, outputs, inputs // 32)
            tensors[f"{name}_blocks"] = chance.integers(0, 256, (*groups, 16), np.uint8)
            tensors[f"{name}_scales"] = chance.integers(119, 126, groups, np.uint8)
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config))

"""GGUF files of small models, and the same models by Hugging Face with the weights unpacked by llama.cpp's package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, quants
from safetensors.torch import save_file

from benchmarks.shared.gguf_files import TypeOf, Values, write_gguf
from benchmarks.shared.random_models import load_model
from moesched.models.checkpoint import open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.gguf.families import GGUF_FAMILIES, architecture_of
from moesched.models.gguf.tensor_names import as_in_gguf, gguf_tensors
from moesched.models.published import published_config, published_tensors
from moesched.models.random_model import write_random_model
from moesched.models.tensors import is_transposed


def gguf_model(config: ModelConfig, folder: Path, type_of: TypeOf, seed: int = 0, **options: Any) -> Path:
    """Write a model of random weights, norms too, to a GGUF file below `folder`."""
    checkpoint = open_checkpoint(write_random_model(config, folder / "plain", seed, dtype="float32"))
    random = np.random.default_rng(seed)
    for stored in checkpoint.tensors.values():
        if len(stored.shape) == 1:
            weights = np.memmap(stored.file, np.float32, "r+", stored.offset, stored.shape)
            weights[:] = 1 + 0.3 * random.standard_normal(stored.shape)
            weights.flush()
    file = folder / f"{config.name}.gguf"
    write_gguf(open_checkpoint(checkpoint.path), file, type_of, **options)
    return file


def unpacked_model(file: Path, config: ModelConfig) -> Any:
    """The model of a GGUF file in float32, by Hugging Face."""
    weights = _unpacked(file, config)
    named = {
        name: np.concatenate([weights[part].reshape(-1) for part, _ in stored.parts]).reshape(stored.shape)
        for name, stored in published_tensors(config).items()
    }
    folder = file.parent / "unpacked"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(published_config(config)))
    save_file(
        {name: torch.from_numpy(each) for name, each in named.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return load_model(folder, torch.float32)


def _unpacked(file: Path, config: ModelConfig) -> dict[str, Values]:
    """The weights by canonical name, in the order of rows of safetensors."""
    read = {each.name: each for each in GGUFReader(file).tensors}
    family = GGUF_FAMILIES[architecture_of(config)]
    weights: dict[str, Values] = {}
    for name, parts, stacks in gguf_tensors(family, as_in_gguf(config)):
        if name not in read:
            continue
        values = quants.dequantize(read[name].data, read[name].tensor_type)
        if stacks:
            weights |= zip(parts, values, strict=True)
            continue
        rows = np.cumsum([config.attention.query_width, config.attention.key_width])
        weights |= zip(parts, np.split(values, rows) if len(parts) == 3 else [values], strict=True)
    for name, values in weights.items():
        if family.interleaved and name.endswith((".q", ".k")):
            pairs = values.reshape(-1, config.attention.head_dim // 2, 2, values.shape[1])
            weights[name] = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
    if config.routed.alternating:
        for name in [name for name in weights if ".gate" in name]:
            pair = np.stack([weights.pop(name), weights.pop(name.replace(".gate", ".up"))], axis=1)
            weights[name.replace(".gate", ".gate_up")] = pair.reshape(-1, *pair.shape[2:])
    for name in [name for name in weights if is_transposed(config, name)]:
        weights[name] = np.ascontiguousarray(weights[name].T)
    return weights

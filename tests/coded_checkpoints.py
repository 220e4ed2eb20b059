"""Checkpoints whose matrices are coded, decoded here once more for Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from benchmarks.shared.random_models import load_model

Decoder = Callable[[npt.NDArray[np.uint8]], npt.NDArray[np.float32]]
"""The weights of blocks (N, bytes of a block)."""


def q8_0(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """A scale in float16, and 32 signed bytes."""
    return blocks[:, 2:].view(np.int8).astype(np.float32) * blocks[:, :2].view(np.float16)


def q4_0(blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """A scale in float16, and 16 bytes: their lower halves are the first 16 codes."""
    codes = np.concatenate([blocks[:, 2:] % 16, blocks[:, 2:] // 16], axis=1).astype(np.float32)
    return (codes - 8) * blocks[:, :2].view(np.float16)


def decoded_model(coded: Path, folder: Path, decode: Decoder, block_bytes: int) -> Any:
    """The model of a folder in float32, with its coded weights decoded, by Hugging Face."""
    folder.mkdir()
    config = json.loads((coded / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: each for file in coded.glob("*.safetensors") for name, each in load_file(file).items()}
    for name, raw in tensors.items():
        if raw.dtype == torch.uint8:
            weights = decode(raw.numpy().reshape(-1, block_bytes)).reshape(len(raw), -1)
            tensors[name] = torch.from_numpy(weights)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return load_model(folder, torch.float32)

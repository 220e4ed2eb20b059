"""Checkpoints whose matrices are coded, decoded here once more for Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from benchmarks.shared.random_models import load_model
from moesched.models.published import published_tensors
from moesched.models.reading import read_config
from moesched.models.stored_formats import StoredFormat


def random_blocks(stored: StoredFormat, rows: int, blocks: int) -> npt.NDArray[np.uint8]:
    """Rows of any bytes, but for scales and minimums, by which weights are finite."""
    random = np.random.default_rng(7)
    raw = random.integers(0, 256, (rows, blocks, stored.block_bytes), dtype=np.uint8)
    if stored.scale_encoding == "exponent":
        raw[..., stored.scale] %= 250
    else:
        for offset in [stored.scale] if stored.minimum is None else [stored.scale, stored.minimum]:
            numbers = random.normal(size=(rows, blocks, 1)).astype(np.float16)
            raw[..., offset : offset + 2] = numbers.view(np.uint8)
    return raw.reshape(rows, -1)


def decoded(raw: npt.NDArray[np.uint8], name: str) -> npt.NDArray[np.float32]:
    """The weights of rows of bytes in a format, as llama.cpp's own package unpacks them."""
    weights: npt.NDArray[np.float32] = gguf.dequantize(raw, gguf.GGMLQuantizationType[name.upper()])
    return weights


def decoded_model(coded: Path, folder: Path, name: str | None = None) -> Any:
    """The model of a folder in float32, with its coded weights decoded, by Hugging Face.

    name: the format of all coded tensors; None to look up each one's.
    """
    folder.mkdir()
    config = json.loads((coded / "config.json").read_text())
    formats = {} if name else _formats(coded)
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: each for file in coded.glob("*.safetensors") for name, each in load_file(file).items()}
    for tensor, raw in tensors.items():
        if raw.dtype == torch.uint8:
            tensors[tensor] = torch.from_numpy(decoded(raw.numpy(), name or formats[tensor]))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return load_model(folder, torch.float32)


def _formats(folder: Path) -> dict[str, str]:
    """The formats of coded tensors in a folder, by their names in files."""
    config = read_config(folder)
    each = {
        name: config.kept_format(stored.parts[0][0]) for name, stored in published_tensors(config).items()
    }
    return {name: stored.name for name, stored in each.items() if stored is not None}

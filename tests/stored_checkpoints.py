"""Small checkpoints written by hand: published, fused and dense, whole or in shards."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moesched.errors import BadInput
from moesched.models.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from moesched.models.tensors import tensor_shapes

Weights = dict[str, bytes | tuple[str, list[int], bytes]]

TINY: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 6, "intermediate_size": 5, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 4, "num_local_experts": 3,
    "num_experts_per_tok": 2, "vocab_size": 11, "torch_dtype": "float32",
}  # fmt: skip


class Stored:
    """Tensors to be written: each is filled with bytes that no other tensor has."""

    def __init__(self, dtype: str = "F32") -> None:
        self.dtype = dtype
        self.item = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8}[dtype]
        self.tensors: dict[str, tuple[str, list[int], bytes]] = {}

    def add(self, name: str, *shape: int) -> None:
        mark = bytes([len(self.tensors) % 251 + 1])
        self.tensors[name] = (self.dtype, list(shape), mark * (math.prod(shape) * self.item))

    def layers(self) -> Iterator[str]:
        """Add all but the experts; the names of each layer's tensors begin with what is yielded for it."""
        self.add("model.embed_tokens.weight", 11, 6)
        self.add("model.norm.weight", 6)
        self.add("lm_head.weight", 11, 6)
        for prefix in ("model.layers.0.", "model.layers.1."):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self.add(f"{prefix}{norm}.weight", 6)
            for name, shape in {"q": (12, 6), "k": (4, 6), "v": (4, 6), "o": (6, 12)}.items():
                self.add(f"{prefix}self_attn.{name}_proj.weight", *shape)
            yield prefix


def published(dtype: str = "F32") -> Stored:
    """A tensor for each expert, as in published Mixtral checkpoints."""
    stored = Stored(dtype)
    for prefix in stored.layers():
        stored.add(prefix + "block_sparse_moe.gate.weight", 3, 6)
        for expert in range(3):
            for name, shape in {"w1": (5, 6), "w2": (6, 5), "w3": (5, 6)}.items():
                stored.add(f"{prefix}block_sparse_moe.experts.{expert}.{name}.weight", *shape)
    return stored


def fused() -> Stored:
    """All experts of a layer in one tensor, as Hugging Face keeps them in memory."""
    stored = Stored()
    for prefix in stored.layers():
        stored.add(prefix + "mlp.gate.weight", 3, 6)
        stored.add(prefix + "mlp.experts.gate_up_proj", 3, 10, 6)
        stored.add(prefix + "mlp.experts.down_proj", 3, 6, 5)
    return stored


def dense() -> Stored:
    """A Llama or Mistral."""
    stored = Stored()
    for prefix in stored.layers():
        for name, shape in {"gate": (5, 6), "up": (5, 6), "down": (6, 5)}.items():
            stored.add(f"{prefix}mlp.{name}_proj.weight", *shape)
    return stored


def write_file(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        entries[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def write_config(directory: Path, **changes: Any) -> None:
    (directory / "config.json").write_text(json.dumps(TINY | changes))


def write(directory: Path, stored: Stored, **changes: Any) -> Path:
    """One file."""
    write_config(directory, **changes)
    write_file(directory / "model.safetensors", stored.tensors)
    return directory


def write_sharded(directory: Path, stored: Stored, shards: int = 3) -> Path:
    """Several files with an index."""
    write_config(directory)
    names = list(stored.tensors)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        write_file(directory / file, {name: stored.tensors[name] for name in names[i::shards]})
        weight_map |= dict.fromkeys(names[i::shards], file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def content(tensor: StoredTensor) -> bytes:
    data = tensor.file.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
    assert len(data) == tensor.nbytes
    return data


def assert_complete(checkpoint: Checkpoint) -> None:
    shapes = tensor_shapes(checkpoint.config)
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == shapes


def refusal(directory: Path) -> str:
    """The one line that opening the checkpoint ends with."""
    with pytest.raises(BadInput) as error:
        open_checkpoint(directory)
    message = str(error.value)
    assert "\n" not in message
    assert "; " in message, "a remedy follows the complaint"
    return message

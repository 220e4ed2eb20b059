"""Small models for tests: random weights, and a tokenizer whose tokens are bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moesched.models.config import ModelConfig
from moesched.models.random_model import write_random_model
from moesched.models.shapes import SHAPES

SMALL = SHAPES["mixtral-0.8b"].varied(
    name="small", layers=4, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8, experts=4,
    vocabulary=256, max_positions=200_000, stop_tokens=(),
)  # fmt: skip
SMALL_DBRX = SHAPES["dbrx"].varied(
    layers=2, hidden=48, intermediate=40, heads=6, kv_heads=2, head_dim=8, experts=5, top_k=3, vocabulary=97,
    stop_tokens=(),
)  # fmt: skip
TINY = SHAPES["mixtral-0.8b"].varied(
    layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=24, experts=3, vocabulary=128,
    max_positions=256,
)  # fmt: skip
"""Its weights are a few hundred kilobytes."""


def small_model(directory: Path, *, text: bool = False, config: ModelConfig = SMALL, **changes: Any) -> Path:
    """A random checkpoint; with `text`, it has a tokenizer."""
    write_random_model(config.varied(**changes), directory, dtype="float32")
    if text:
        byte_tokenizer(directory)
    return directory


def byte_tokenizer(directory: Path) -> Path:
    """A tokenizer.json with one token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = directory / "tokenizer.json"
    tokenizer.save(str(path))
    return path

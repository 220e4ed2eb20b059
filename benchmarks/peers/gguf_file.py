"""A GGUF file of a Mixtral checkpoint: the same bfloat16 numbers, in llama.cpp's names and order."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moesched.models.checkpoint import Checkpoint, open_checkpoint
from moesched.models.config import ModelConfig

Values = npt.NDArray[Any]

OUTSIDE = {"embedding": "token_embd", "final_norm": "output_norm", "lm_head": "output"}
IN_LAYERS = {
    "attention_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "ffn_norm": "ffn_norm",
    "router": "ffn_gate_inp",
}
STACKED = ("gate", "up", "down")
FLOAT32 = ("_norm", "router")


def gguf_of(model: Path) -> Path:
    """The GGUF file of a model, in this environment's folder; written now if there is none."""
    file = Path(sys.prefix) / f"{model.name}.gguf"
    if not file.exists():
        begun = file.with_suffix(".part")
        write_gguf(open_checkpoint(model), begun)
        begun.rename(file)
    return file


def write_gguf(checkpoint: Checkpoint, file: Path) -> None:
    """Write all weights of a Mixtral checkpoint in bfloat16; norms and routers as float32, as llama.cpp wants them."""
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(file, "llama")
    describe(writer, checkpoint.config)
    for name, values in tensors(checkpoint):
        if values.dtype == np.float32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, values.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer: Any, config: ModelConfig) -> None:
    """The model's sizes, and that there is no tokenizer."""
    writer.add_vocab_size(config.vocabulary)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.routed.intermediate)
    writer.add_head_count(config.attention.heads)
    writer.add_head_count_kv(config.attention.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(config.attention.head_dim)
    writer.add_rope_freq_base(config.attention.rope_theta)
    writer.add_expert_count(config.routed.experts)
    writer.add_expert_used_count(config.routed.top_k)
    writer.add_tokenizer_model("no_vocab")


def tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Values]]:
    """Names and values: float32, or the bits of bfloat16; a layer's experts are one tensor of three dimensions."""
    config = checkpoint.config
    for name, theirs in OUTSIDE.items():
        yield f"{theirs}.weight", stored(checkpoint, name)
    for layer in range(config.layers):
        for name, theirs in IN_LAYERS.items():
            values = stored(checkpoint, f"layers.{layer}.{name}")
            if name in ("q", "k"):
                values = interleaved(values, config.attention.head_dim)
            yield f"blk.{layer}.{theirs}.weight", values
        for name in STACKED:
            experts = [
                stored(checkpoint, f"layers.{layer}.experts.{expert}.{name}")
                for expert in range(config.routed.experts)
            ]
            yield f"blk.{layer}.ffn_{name}_exps.weight", np.stack(experts)


def stored(checkpoint: Checkpoint, name: str) -> Values:
    """A tensor of the files."""
    tensor = checkpoint.tensors[name]
    assert tensor.format.name == "bfloat16" and tensor.columns is None
    bits = np.memmap(tensor.file, dtype=np.uint16, mode="r", offset=tensor.offset, shape=tensor.shape)
    if name.endswith(FLOAT32):
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits


def interleaved(matrix: Values, head_dim: int) -> Values:
    """Rows of queries or keys in the order in which llama.cpp rotates pairs: neighbours, not halves of a head."""
    heads = matrix.shape[0] // head_dim
    halves = matrix.reshape(heads, 2, head_dim // 2, matrix.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(matrix.shape))

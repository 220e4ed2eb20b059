"""GGUF files of checkpoints, written by the package of llama.cpp: its names, order of rows, and types of weights."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import (
    GGML_QUANT_SIZES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    TokenType,
    quants,
)

from moesched.models.architectures.architecture import Stored
from moesched.models.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from moesched.models.config import ModelConfig
from moesched.models.encoding import encoded
from moesched.models.gguf.families import GGUF_FAMILIES, architecture_of
from moesched.models.gguf.tensor_names import as_in_gguf, gguf_tensors
from moesched.models.gguf.types import TENSOR_TYPES
from moesched.models.layers import GroupedAttention
from moesched.models.published import with_shapes
from moesched.models.rotary import Llama3, Yarn
from moesched.models.tensor_shapes import Shape
from moesched.models.tensors import is_transposed

Values = npt.NDArray[np.float32]
TypeOf = Callable[[str, Shape], GGMLQuantizationType]
"""The type of a tensor, by its name in the file and its shape."""

ROUTER = "ffn_gate_inp"
_NUMBERS = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def bfloat16(name: str, shape: Shape) -> GGMLQuantizationType:
    """Norms and routers in float32, as llama.cpp wants them, all other weights in bfloat16."""
    return quantized(GGMLQuantizationType.BF16)(name, shape)


def quantized(kind: GGMLQuantizationType) -> TypeOf:
    """Norms, biases and routers in float32, as llama.cpp wants them, all other weights of one type."""

    def type_of(name: str, shape: Shape) -> GGMLQuantizationType:
        small = len(shape) == 1 or ROUTER in name or name.endswith(".bias")
        return GGMLQuantizationType.F32 if small else kind

    return type_of


def q4_k_m(name: str, shape: Shape) -> GGMLQuantizationType:
    """Types as in files of Q4_K_M: every other layer's value and down matrices, and the LM head, keep more bits."""
    favoured = name == "output.weight" or (
        ("attn_v" in name or "ffn_down" in name) and int(name.split(".")[1]) % 2 == 0
    )
    return quantized(GGMLQuantizationType.Q6_K if favoured else GGMLQuantizationType.Q4_K)(name, shape)


def gguf_of(model: Path) -> Path:
    """The GGUF file of a model, in this environment's folder; written now if there is none."""
    file = Path(sys.prefix) / f"{model.name}.gguf"
    if not file.exists():
        begun = file.with_suffix(".part")
        write_gguf(open_checkpoint(model), begun)
        begun.rename(file)
    return file


def write_gguf(
    checkpoint: Checkpoint,
    file: Path,
    type_of: TypeOf = bfloat16,
    describe: Callable[[Any], None] = lambda writer: writer.add_tokenizer_model("no_vocab"),
    **options: Any,
) -> None:
    """Write a checkpoint of plain weights.

    Args:
        describe: adds keys of the tokenizer, or others, to a GGUFWriter.
        options: keywords of the GGUFWriter.
    """
    writer = GGUFWriter(file, architecture_of(checkpoint.config), **options)
    _describe(writer, checkpoint.config)
    describe(writer)
    for stored, values in tensors(checkpoint):
        kind = type_of(stored.name, values.shape)
        writer.add_tensor(stored.name, _packed(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: Any, file: Path) -> None:
    """Add the byte pairs of a tokenizer.json, whose first token begins texts and whose second one ends them."""
    values = json.loads(file.read_text())
    tokens = sorted(values["model"]["vocab"], key=values["model"]["vocab"].__getitem__)
    special = {each["content"] for each in values["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if each in special else TokenType.NORMAL for each in tokens])
    writer.add_token_merges([" ".join(each) for each in values["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(True)


def write_sparse_gguf(
    config: ModelConfig, file: Path, type_of: TypeOf, describe: Callable[[Any], None]
) -> Path:
    """Write a file with holes in place of its weights."""
    writer = GGUFWriter(file, architecture_of(config))
    _describe(writer, config)
    describe(writer)
    nbytes = 0
    config = as_in_gguf(config)
    tensors = gguf_tensors(GGUF_FAMILIES[architecture_of(config)], config)
    for name, stored in with_shapes(config, tensors).items():
        kind = type_of(name, stored.shape)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        size = math.prod(stored.shape) // block * block_bytes
        writer.add_tensor_info(name, stored.shape, np.dtype(np.float32), size, raw_dtype=kind)
        nbytes += writer.ggml_pad(size, writer.data_alignment)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(file, writer.ggml_pad(file.stat().st_size, writer.data_alignment) + nbytes)
    return file


def tensors(checkpoint: Checkpoint) -> Iterator[tuple[Stored, Values]]:
    """Names of tensors with their values; a layer's experts are one tensor of three dimensions."""
    config = checkpoint.config
    family = GGUF_FAMILIES[architecture_of(config)]
    for stored in gguf_tensors(family, as_in_gguf(config)):
        if config.routed.experts == 1 and "router" in stored.parts[0]:
            continue
        parts = [values_of(checkpoint, name) for name in stored.parts]
        if family.interleaved and stored.parts[0].endswith((".q", ".k")):
            parts = [interleaved(parts[0], config.attention.head_dim)]
        yield stored, np.stack(parts) if stored.stacks else np.concatenate(parts)


def values_of(checkpoint: Checkpoint, name: str) -> Values:
    """A tensor of plain weights by its name in a model `as_in_gguf`, its rows as outputs."""
    if name in checkpoint.tensors:
        return _rows_of(checkpoint, name)
    of_expert, _, part = name.rpartition(".")
    matrix, bias, _ = part.partition("_bias")
    both = _rows_of(checkpoint, f"{of_expert}.gate_up{bias}")
    return both[("gate", "up").index(matrix) :: 2]


def _rows_of(checkpoint: Checkpoint, name: str) -> Values:
    tensor: StoredTensor = checkpoint.tensors[name]
    assert tensor.format.name in _NUMBERS and tensor.columns is None
    numbers: npt.NDArray[Any] = np.memmap(
        tensor.file, dtype=_NUMBERS[tensor.format.name], mode="r", offset=tensor.offset, shape=tensor.shape
    )
    if tensor.format.name == "bfloat16":
        numbers = (numbers.astype(np.uint32) << 16).view(np.float32)
    transposed = is_transposed(checkpoint.config, name)
    return np.ascontiguousarray(numbers.T if transposed else numbers, dtype=np.float32)


def interleaved(matrix: Values, head_dim: int) -> Values:
    """Rows of queries or keys in the order in which llama.cpp rotates pairs: neighbours, not halves of a head."""
    heads = matrix.shape[0] // head_dim
    halves = matrix.reshape(heads, 2, head_dim // 2, matrix.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(matrix.shape))


def _packed(values: Values, kind: GGMLQuantizationType) -> npt.NDArray[Any]:
    """Rows in the format of a type; llama.cpp's package unpacks k-quants, but does not write them."""
    stored = TENSOR_TYPES[kind].stored
    if stored is None or stored.factors is None:
        packed: npt.NDArray[Any] = quants.quantize(values, kind)
        return packed
    return encoded(values.reshape(-1), stored).reshape(*values.shape[:-1], -1)


def _describe(writer: Any, config: ModelConfig) -> None:
    """Add the model's sizes."""
    attention, network = config.attention, config.routed
    writer.add_vocab_size(config.vocabulary)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden)
    writer.add_block_count(config.layers)
    first = config.layer(0).feed_forward
    writer.add_feed_forward_length(network.intermediate if first.experts else first.shared)
    writer.add_head_count(attention.heads)
    writer.add_head_count_kv(attention.kv_heads)
    writer.add_key_length(attention.head_dim)
    writer.add_value_length(attention.head_dim)
    if config.norm == "rms":
        writer.add_layer_norm_rms_eps(config.norm_eps)
    else:
        writer.add_layer_norm_eps(config.norm_eps)
    writer.add_rope_dimension_count(attention.rotary.turning(attention.head_dim))
    writer.add_rope_freq_base(attention.rotary.theta)
    _describe_scaling(writer, attention)
    if attention.clip is not None:
        writer.add_clamp_kqv(attention.clip)
    window = config.layer(0).grouped.window
    if window is not None:
        writer.add_sliding_window(window)
    if network.experts > 1:
        writer.add_expert_count(network.experts)
        writer.add_expert_used_count(network.top_k)
        writer.add_expert_feed_forward_length(network.intermediate)
    if config.form == "granite_moe":
        writer.add_attention_scale(attention.score_scale)
        writer.add_embedding_scale(config.embedding_factor)
        writer.add_residual_scale(config.residual_factor)
        writer.add_logit_scale(1 / config.logits_factor)
    router = network.router
    if router.score == "sigmoid":
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
    if network.shared:
        writer.add_expert_shared_count(network.shared // network.intermediate)
        writer.add_expert_weights_norm(router.normalised)
        writer.add_expert_weights_scale(router.scale)
        writer.add_expert_group_count(router.groups)
        writer.add_expert_group_used_count(router.kept_groups)
        writer.add_leading_dense_block_count(sum(not each.feed_forward.experts for each in config.pattern))


def _describe_scaling(writer: Any, attention: GroupedAttention) -> None:
    """Add the scaling of the rotary embedding: of Llama 3 as factors, as llama.cpp's converter does."""
    scaling = attention.rotary.scaling
    if isinstance(scaling, Llama3):
        slowed = attention.rotary.slowed(attention.head_dim)
        writer.add_tensor("rope_freqs.weight", np.array([1 / each for each in slowed], np.float32))
    elif scaling is not None:
        writer.add_rope_scaling_type(RopeScalingType(scaling.__struct_config__.tag))
        writer.add_rope_scaling_factor(scaling.factor)
    if isinstance(scaling, Yarn):
        writer.add_rope_scaling_orig_ctx_len(scaling.original_max_position_embeddings)
        writer.add_rope_scaling_yarn_beta_fast(scaling.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(scaling.beta_slow)

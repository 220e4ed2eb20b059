"""Checkpoints: what is read from a Hugging Face directory, and how a bad one is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moesched.errors import BadInput
from moesched.models.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from moesched.models.reading import read_config
from moesched.models.tensors import tensor_shapes

Weights = dict[str, bytes | tuple[str, list[int], bytes]]

TINY: dict[str, Any] = {
    "model_type": "mixtral",
    "hidden_size": 6,
    "intermediate_size": 5,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "vocab_size": 11,
    "torch_dtype": "float32",
}


# ---------------------------------------------------------------- checkpoints to read


class Stored:
    """Tensors to be written: each is filled with bytes that no other tensor has."""

    def __init__(self, dtype: str = "F32") -> None:
        self.dtype = dtype
        self.item = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8}[dtype]
        self.tensors: dict[str, tuple[str, list[int], bytes]] = {}

    def add(self, name: str, *shape: int) -> None:
        mark = bytes([len(self.tensors) % 251 + 1])
        self.tensors[name] = (self.dtype, list(shape), mark * (math.prod(shape) * self.item))

    def add_globals(self) -> None:
        self.add("model.embed_tokens.weight", 11, 6)
        self.add("model.norm.weight", 6)
        self.add("lm_head.weight", 11, 6)

    def add_attention(self, layer: int) -> None:
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            self.add(f"{prefix}{norm}.weight", 6)
        for name, shape in {"q": (12, 6), "k": (4, 6), "v": (4, 6), "o": (6, 12)}.items():
            self.add(f"{prefix}self_attn.{name}_proj.weight", *shape)


def published(dtype: str = "F32") -> Stored:
    """A tensor for each expert, as in published Mixtral checkpoints."""
    stored = Stored(dtype)
    stored.add_globals()
    for layer in range(2):
        stored.add_attention(layer)
        prefix = f"model.layers.{layer}.block_sparse_moe."
        stored.add(prefix + "gate.weight", 3, 6)
        for expert in range(3):
            for name, shape in {"w1": (5, 6), "w2": (6, 5), "w3": (5, 6)}.items():
                stored.add(f"{prefix}experts.{expert}.{name}.weight", *shape)
    return stored


def fused() -> Stored:
    """All experts of a layer in one tensor, as Hugging Face keeps them in memory."""
    stored = Stored()
    stored.add_globals()
    for layer in range(2):
        stored.add_attention(layer)
        prefix = f"model.layers.{layer}.mlp."
        stored.add(prefix + "gate.weight", 3, 6)
        stored.add(prefix + "experts.gate_up_proj", 3, 10, 6)
        stored.add(prefix + "experts.down_proj", 3, 6, 5)
    return stored


def dense() -> Stored:
    """A Llama or Mistral."""
    stored = Stored()
    stored.add_globals()
    for layer in range(2):
        stored.add_attention(layer)
        for name, shape in {"gate": (5, 6), "up": (5, 6), "down": (6, 5)}.items():
            stored.add(f"model.layers.{layer}.mlp.{name}_proj.weight", *shape)
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


# ---------------------------------------------------------------- what is found


@pytest.mark.parametrize("write_it", [write, write_sharded])
def test_a_published_mixtral_has_every_tensor_in_its_place(
    tmp_path: Path, write_it: Callable[[Path, Stored], Path]
) -> None:
    stored = published()
    checkpoint = open_checkpoint(write_it(tmp_path, stored))
    assert_complete(checkpoint)
    pairs = {
        "embedding": "model.embed_tokens.weight",
        "layers.1.attention_norm": "model.layers.1.input_layernorm.weight",
        "layers.1.ffn_norm": "model.layers.1.post_attention_layernorm.weight",
        "layers.0.o": "model.layers.0.self_attn.o_proj.weight",
        "layers.1.router": "model.layers.1.block_sparse_moe.gate.weight",
        "layers.1.experts.2.gate": "model.layers.1.block_sparse_moe.experts.2.w1.weight",
        "layers.1.experts.2.down": "model.layers.1.block_sparse_moe.experts.2.w2.weight",
        "layers.1.experts.2.up": "model.layers.1.block_sparse_moe.experts.2.w3.weight",
    }
    for canonical, name in pairs.items():
        assert content(checkpoint.tensors[canonical]) == stored.tensors[name][2]


def test_an_expert_of_a_fused_tensor_is_its_range_of_bytes(tmp_path: Path) -> None:
    stored = fused()
    gate_up, down = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.down_proj"
    part = 5 * 6 * 4
    marks = [bytes([i + 1]) * part for i in range(6)]  # gate and up of expert 0, of expert 1, of expert 2
    stored.tensors[gate_up] = ("F32", [3, 10, 6], b"".join(marks))
    stored.tensors[down] = ("F32", [3, 6, 5], b"".join(marks[:3]))
    checkpoint = open_checkpoint(write(tmp_path, stored))
    assert_complete(checkpoint)
    for expert in range(3):
        parts = [f"layers.1.experts.{expert}.{part}" for part in ("gate", "up", "down")]
        found = [content(checkpoint.tensors[name]) for name in parts]
        assert found == [marks[2 * expert], marks[2 * expert + 1], marks[expert]]


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
def test_a_dense_model_has_one_expert_and_no_router(tmp_path: Path, model_type: str) -> None:
    checkpoint = open_checkpoint(write(tmp_path, dense(), model_type=model_type))
    assert_complete(checkpoint)
    assert (checkpoint.config.experts, checkpoint.config.top_k) == (1, 1)
    assert "layers.0.experts.0.gate" in checkpoint.tensors
    assert "layers.0.router" not in checkpoint.tensors


def test_tied_embeddings_need_no_lm_head(tmp_path: Path) -> None:
    stored = published()
    del stored.tensors["lm_head.weight"]
    checkpoint = open_checkpoint(write(tmp_path, stored, tie_word_embeddings=True))
    assert_complete(checkpoint)
    assert "lm_head" not in checkpoint.tensors


@pytest.mark.parametrize(("dtype", "name"), [("BF16", "bfloat16"), ("F16", "float16"), ("F32", "float32")])
def test_each_tensor_says_its_dtype(tmp_path: Path, dtype: str, name: str) -> None:
    checkpoint = open_checkpoint(write(tmp_path, published(dtype)))
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {name}


def test_tensors_that_the_model_has_no_use_for_are_left_alone(tmp_path: Path) -> None:
    stored = published()
    stored.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F8_E4M3", [2], b"..")
    stored.add("model.layers.9.input_layernorm.weight", 6)
    assert_complete(open_checkpoint(write(tmp_path, stored)))


# ---------------------------------------------------------------- configurations


def config_of(directory: Path, **changes: Any) -> Any:
    write_config(directory, **changes)
    return read_config(directory)


def test_every_setting_reaches_the_configuration(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        rms_norm_eps=1e-4,
        rope_theta=5e5,
        sliding_window=8,
        max_position_embeddings=99,
        tie_word_embeddings=True,
        eos_token_id=[3, 4],
        torch_dtype="bfloat16",
    )
    assert (config.name, config.layers, config.hidden, config.intermediate) == (tmp_path.name, 2, 6, 5)
    assert (config.heads, config.kv_heads, config.head_dim, config.vocabulary) == (3, 1, 4, 11)
    assert (config.experts, config.top_k, config.norm_eps, config.rope_theta) == (3, 2, 1e-4, 5e5)
    assert (config.sliding_window, config.max_positions, config.tied_embeddings) == (8, 99, True)
    assert (config.stop_tokens, config.dtype) == ((3, 4), "bfloat16")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 77.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
        {"rope_theta": 77, "rope_scaling": None, "rope_parameters": None},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 77.0}},
        {"rope_theta": 5.0, "rope_scaling": {"type": "default", "rope_theta": 77.0}},
    ],
)
def test_rope_settings_are_read_in_either_spelling(tmp_path: Path, rope: dict[str, Any]) -> None:
    assert config_of(tmp_path, **rope).rope_theta == 77.0


DEFAULTS = {
    "mixtral": (14336, 8, 8, 2, 131072, 1e-5, 1e6, None),
    "mistral": (14336, 8, 1, 1, 131072, 1e-6, 1e4, 4096),
    "llama": (11008, 32, 1, 1, 2048, 1e-6, 1e4, None),
}


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_what_is_missing_has_the_default_of_hugging_face(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    config = read_config(tmp_path)
    assert (config.layers, config.hidden, config.heads, config.head_dim) == (32, 4096, 32, 128)
    assert (config.vocabulary, config.stop_tokens, config.tied_embeddings) == (32000, (2,), False)
    assert DEFAULTS[model_type] == (
        config.intermediate,
        config.kv_heads,
        config.experts,
        config.top_k,
        config.max_positions,
        config.norm_eps,
        config.rope_theta,
        config.sliding_window,
    )


def test_a_null_means_the_default_of_hugging_face(tmp_path: Path) -> None:
    config = config_of(
        tmp_path,
        model_type="mistral",
        head_dim=None,
        num_key_value_heads=None,
        rope_theta=None,
        rms_norm_eps=None,
        sliding_window=None,
        eos_token_id=None,
    )
    assert (config.head_dim, config.kv_heads) == (2, 3)  # hidden_size // heads, as many as heads
    assert (config.rope_theta, config.norm_eps) == (1e4, 1e-6)
    assert (config.sliding_window, config.stop_tokens) == (None, ())  # null switches these off


def test_stop_tokens_of_generation_go_before_those_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert config_of(tmp_path, eos_token_id=2).stop_tokens == (7, 8)


# ---------------------------------------------------------------- what is refused


def refusal(directory: Path) -> str:
    """The one line that opening the checkpoint ends with."""
    with pytest.raises(BadInput) as error:
        open_checkpoint(directory)
    message = str(error.value)
    assert "\n" not in message
    assert "; " in message, "a remedy follows the complaint"
    return message


def test_a_directory_without_config_json_is_refused(tmp_path: Path) -> None:
    assert f"{tmp_path} has no config.json" in refusal(tmp_path)
    assert "nowhere has no config.json" in refusal(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "{", "[]", "not json", '"\\ud800"', '{"hidden_size": "large"}'])
def test_a_config_that_is_no_json_object_of_settings_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert "config.json: " in refusal(tmp_path)


def test_a_config_in_no_known_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"model_type": "\xff\xfe"}')
    assert "config.json: " in refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"model_type": None}, "model_type is None"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type is 'llama3'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is 'awq'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is ['full_attention'"),
        ({"torch_dtype": "float8"}, "dtype is 'float8'"),
        ({"num_hidden_layers": 0}, "layers is 0"),
        ({"vocab_size": -5}, "vocabulary is -5"),
        ({"num_attention_heads": 0}, "heads is 0"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "3 attention heads and 2 key-value heads"),
        ({"head_dim": 3}, "head_dim is 3"),
        ({"num_experts_per_tok": 4}, "num_experts_per_tok is 4"),
    ],
)
def test_a_model_that_the_kernels_do_not_compute_is_refused_with_its_value(
    tmp_path: Path, changes: dict[str, Any], complaint: str
) -> None:
    message = refusal(write(tmp_path, published(), **changes))
    assert message.startswith(str(tmp_path / "config.json"))
    assert complaint in message


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert f"{tmp_path / 'model.safetensors'} is missing" in refusal(tmp_path)


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    shard = write_sharded(tmp_path, published()) / "model-00002-of-00003.safetensors"
    shard.unlink()
    assert f"{shard} is missing" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": 1}}', '{"weight_map": null}'])
def test_a_garbage_index_is_refused(tmp_path: Path, text: str) -> None:
    index = write_sharded(tmp_path, published()) / "model.safetensors.index.json"
    index.write_text(text)
    assert refusal(tmp_path).startswith(f"{index}: ")


def test_a_tensor_that_is_not_in_the_shard_of_the_index_is_refused(tmp_path: Path) -> None:
    index = write_sharded(tmp_path, published()) / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    weight_map["lm_head.weight"] = "model-00001-of-00003.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert "model-00001-of-00003.safetensors lacks lm_head.weight" in refusal(tmp_path)


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, published()) / "model.safetensors"
    whole = file.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    for size in (0, 5, 8, 9, header_end - 1, header_end, header_end + 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        message = refusal(tmp_path)
        assert f"{file} is truncated" in message
        assert f"it has {size:,} bytes" in message


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 64,
        b"<html>not found</html>",
        (20).to_bytes(8, "little") + b"\x00" * 40,
        (2).to_bytes(8, "little") + b"[]",
        (9).to_bytes(8, "little") + b'{"a": {}}',
        (13).to_bytes(8, "little") + b'{"\xff\xfe": {}}  ',
    ],
)
def test_a_garbage_header_is_refused(tmp_path: Path, content: bytes) -> None:
    file = write(tmp_path, published()) / "model.safetensors"
    file.write_bytes(content)
    message = refusal(tmp_path)
    assert message.startswith(f"{file} ")
    assert "safetensors" in message


@pytest.mark.parametrize("offsets", [[-4, 20], [40, 16], [0, 8], [0, 1 << 60]])
def test_offsets_that_do_not_fit_the_shape_are_refused(tmp_path: Path, offsets: list[int]) -> None:
    file = write(tmp_path, published()) / "model.safetensors"
    entry = {"model.norm.weight": {"dtype": "F32", "shape": [6], "data_offsets": offsets}}
    header = json.dumps(entry).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(100))
    assert f"{file}: model.norm.weight of shape [6] takes 24 bytes" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["model.layers.1.self_attn.k_proj.weight", "lm_head.weight"])
def test_a_tensor_of_another_shape_is_refused_with_both_shapes(tmp_path: Path, name: str) -> None:
    stored = published()
    _, (rows, columns), _ = stored.tensors[name]
    stored.add(name, rows + 1, columns)
    message = refusal(write(tmp_path, stored))
    assert f"{name} has shape [{rows + 1}, {columns}], config.json says [{rows}, {columns}]" in message
    assert str(tmp_path / "model.safetensors") in message


def test_a_fused_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    stored = fused()
    stored.add("model.layers.0.mlp.experts.gate_up_proj", 3, 6, 10)
    message = refusal(write(tmp_path, stored))
    assert "gate_up_proj has shape [3, 6, 10], config.json says [3, 10, 6]" in message


def test_missing_tensors_are_counted_and_the_first_is_named(tmp_path: Path) -> None:
    stored = published()
    for expert in range(3):
        del stored.tensors[f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"]
    message = refusal(write(tmp_path, stored))
    assert f"{tmp_path} lacks 3 of the model's tensors, layers.1.experts.0.down the first" in message


def test_a_missing_lm_head_is_refused_unless_it_is_tied(tmp_path: Path) -> None:
    stored = published()
    del stored.tensors["lm_head.weight"]
    assert "lacks 1 of the model's tensors, lm_head" in refusal(write(tmp_path, stored))


def test_a_dtype_without_a_kernel_is_refused(tmp_path: Path) -> None:
    stored = published()
    stored.tensors["lm_head.weight"] = ("F8_E4M3", [11, 6], bytes(66))
    assert "lm_head.weight has dtype 'F8_E4M3'" in refusal(write(tmp_path, stored))


def test_a_bias_is_refused_since_no_kernel_adds_it(tmp_path: Path) -> None:
    stored = published()
    stored.add("model.layers.0.self_attn.q_proj.bias", 12)
    assert "model.layers.0.self_attn.q_proj.bias is a bias" in refusal(write(tmp_path, stored))

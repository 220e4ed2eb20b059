"""Checkpoints: tensors found in a Hugging Face directory, and how a bad file is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moesched.models.checkpoint import open_checkpoint
from stored_checkpoints import (
    Stored,
    assert_complete,
    content,
    dense,
    fused,
    published,
    refusal,
    write,
    write_config,
    write_sharded,
)

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
    assert (checkpoint.config.routed.experts, checkpoint.config.routed.top_k) == (1, 1)
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
    assert {tensor.format.name for tensor in checkpoint.tensors.values()} == {name}


# ---------------------------------------------------------------- what is refused


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert f"cannot read weights {tmp_path / 'model.safetensors'}: No such file" in refusal(tmp_path)


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    shard = write_sharded(tmp_path, published()) / "model-00002-of-00003.safetensors"
    shard.unlink()
    assert f"cannot read weights {shard}: No such file" in refusal(tmp_path)


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
